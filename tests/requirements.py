"""What some tests need beyond what the project installs: without it they are skipped, and say why."""

from importlib.util import find_spec

import pytest

needs_tpu_compiler = pytest.mark.skipif(find_spec("libtpu") is None, reason="no XLA:TPU: pip install '.[tpu]'")
