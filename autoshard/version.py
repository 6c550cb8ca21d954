"""The version of the package; a release is tagged ``v`` and this."""

__version__ = "0.2.0"
