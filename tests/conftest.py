"""Eight virtual CPU devices for every test, set before JAX starts; hypothesis keeps no deadlines, since machines are busy."""

import os

from hypothesis import settings

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8").strip()

# Most of the time is that of compiling programs that run once or twice: LLVM makes their machine code as it comes. XLA's own passes are as
# always, so modules are the same and so are their collectives; what is compiled ahead of time for TPUs and GPUs has options of its own.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

os.environ["AUTOSHARD_CORRECTIONS"] = "off"  # what a user's compiler made of other programs is neither read nor added to

settings.register_profile("autoshard", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("autoshard")
