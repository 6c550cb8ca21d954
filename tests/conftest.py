"""Eight virtual CPU devices for every test, set before JAX starts; hypothesis keeps no deadlines, since machines are busy."""

import gc
import os
from importlib.metadata import version

from hypothesis import settings

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of the time is that of compiling programs that run once or twice. So LLVM makes their machine code as it comes, and that of fused
# operations does not come by way of MLIR, which takes three times as long; newer XLA has no other way. XLA:CPU then fuses somewhat
# otherwise: products and collectives are the same. What is compiled ahead of time for TPUs and GPUs has options of its own.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
FLAGS = ["--xla_force_host_platform_device_count=8", "--xla_cpu_parallel_codegen_split_count=1"]
FLAGS += ["--xla_cpu_use_fusion_emitters=false"] if version("jaxlib").startswith("0.10.") else []
GIVEN = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join([GIVEN, *(flag for flag in FLAGS if flag.partition("=")[0] not in GIVEN)]).strip()

os.environ["AUTOSHARD_CORRECTIONS"] = "off"  # what a user's compiler made of other programs is neither read nor added to

pytest_plugins = ["selection"]

gc.set_threshold(10_000, 20, 20)  # JAX keeps what it has traced, which every full collection goes through again


def pytest_collection_finish():
    gc.freeze()  # what is imported by now stays


settings.register_profile("autoshard", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("autoshard")
