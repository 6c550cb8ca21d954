"""Reference models by name, at published sizes: the train steps of the strategy library, of tests and of notebooks.

Equal layers are scanned, except GPT-2's; large models compute each layer again in the backward pass. Batches of the largest models are
a few sequences a device: the published ones, of millions of tokens, are accumulated from such (``--microbatches``). What else differs
from the publication is said at the model. ``published.gpt_2.step`` and ``published.gpt_2.arguments`` are made when they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

from benchmarks import models
from benchmarks.models import Program


@dataclass(frozen=True)
class Published:
    """A model of published sizes.

    Attributes:
        make: makes its train step and the abstract arguments.
        source: where its sizes are published.
        expert: the searcher that shards it as is usual in the field.
        clusters: those it is sharded over in the library.
        pins: of the expert's sharding, specs by paths as the command line takes them, where its searcher is ``manual``.
    """

    make: Callable[[], Program]
    source: str
    expert: str
    clusters: tuple[str, ...]
    pins: tuple[str, ...] = ()

    @cached_property
    def program(self) -> Program:
        return self.make()

    @property
    def step(self) -> Callable:
        return self.program[0]

    @property
    def arguments(self) -> tuple:
        return self.program[1]


_SMALL = ("v5e:4x4", "h100:8x1")
_SCANNED = {"scan": True, "remat": True}

lstm_gnmt = Published(
    partial(models.lstm, layers=8, width=1024, vocabulary=32_000, batch=1024, length=64),
    "arXiv 1609.08144, section 7: 8 layers of 1024, 32,000 word pieces; one network instead of an encoder and a decoder",
    "data_parallel",
    _SMALL,
)
dlrm_criteo = Published(
    partial(models.dlrm, tables=26, rows=1_000_000, width=128, batch=65_536),
    "MLPerf Training: 26 tables of width 128, batch 65,536; a million rows each, where Criteo's have up to 40 million",
    "manual",
    _SMALL,
    ("batch*=data", "state*['tables']*=data"),  # rows of tables over all devices, small networks on each (arXiv 1906.00091, section 3)
)
vit_large = Published(
    partial(models.vit, layers=24, width=1024, heads=16, batch=4096, **_SCANNED),
    "arXiv 2010.11929, table 1: ViT-L/16; batch of section 4.1",
    "data_parallel",
    (*_SMALL, "v6e:4x4"),
)
bert_large = Published(
    partial(models.bert, layers=24, width=1024, heads=16, batch=256, length=512, **_SCANNED),
    "arXiv 1810.04805, section 3 and appendix A.2",
    "data_parallel",
    (*_SMALL, "v6e:4x4"),
)
switch_base = Published(
    partial(models.moe, layers=12, width=768, heads=12, experts=128, vocabulary=32_128, batch=2048, length=512, **_SCANNED),
    "arXiv 2101.03961, table 9: Switch-Base with 128 experts; here every layer has experts, of width 3072, in a decoder",
    "manual",
    ("v5e:4x4", "h100:8x8"),
    ("batch*=data", "state*['up']=None,data", "state*['down']=None,data"),  # experts over all devices (section 2.3)
)
llama_3_8b = Published(
    partial(models.llama, layers=32, batch=256, length=4096, **_SCANNED),
    "arXiv 2407.21783, table 3; sequences of 4,096, section 3.4.1",
    "fully_sharded",
    ("v5e:16x16", "h100:8x8", "v6e:16x16"),
)
t5_xl = Published(
    partial(models.encoder_decoder, layers=24, width=2048, heads=32, batch=2048, length=512, **_SCANNED),
    "arXiv 1910.10683, its version 1.1 of 24 and 24 layers of 2048; networks of 8192, instead of gated ones of 5120",
    "fully_sharded",
    ("v5e:16x16", "h100:8x8"),
)
gpt_3_13b = Published(
    partial(models.gpt, layers=40, width=5120, heads=40, vocabulary=50_304, batch=256, length=2048, **_SCANNED),
    "arXiv 2005.14165, table 2.1, whose width of 5140 is no multiple of its 40 heads of 128; 50,257 tokens, padded",
    "fully_sharded",
    ("v5e:16x16", "v5p:4x4x4", "h100:8x8"),
)
mixtral_8x7b = Published(
    partial(models.llama, layers=32, vocabulary=32_000, batch=64, length=4096, experts=8, **_SCANNED),
    "arXiv 2401.04088, table 1; sequences of 4,096 instead of 32,768",
    "fully_sharded",
    ("v5p:4x4x4", "h100:8x8"),
)
llama_3_70b = Published(
    partial(models.llama, layers=80, width=8192, heads=64, ffn=28_672, batch=64, length=4096, **_SCANNED),
    "arXiv 2407.21783, table 3; sequences of 4,096, section 3.4.1",
    "fully_sharded",
    ("v5p:4x4x4", "h100:8x8", "b200:8x4"),
)
gpt_3_175b = Published(
    partial(models.gpt, layers=96, width=12_288, heads=96, vocabulary=50_304, batch=64, length=2048, **_SCANNED),
    "arXiv 2005.14165, table 2.1; 50,257 tokens, padded",
    "fully_sharded",
    ("v5p:4x4x4", "h100:8x8", "b200:8x4"),
)
unet = Published(
    partial(models.unet, depth=4, channels=64, batch=64, side=512),
    "arXiv 1505.04597, figure 1: 64 to 1024 channels; halved by strides; padded, of 512 instead of 572 pixels a side",
    "data_parallel",
    _SMALL,
)
resnet_50 = Published(
    partial(models.resnet, blocks=(3, 4, 6, 3), classes=1000, batch=1024),
    "arXiv 1512.03385, table 1",
    "data_parallel",
    _SMALL,
)
gpt_2 = Published(
    partial(models.gpt, layers=12, width=768, heads=12, vocabulary=50_304, batch=512, length=1024),
    "Radford et al. 2019, table 2, the smallest; 50,257 tokens, padded",
    "data_parallel",
    _SMALL,
)

PUBLISHED: dict[str, Published] = {name: each for name, each in list(globals().items()) if isinstance(each, Published)}
"""By name, those of the fewest distinct operations first."""
