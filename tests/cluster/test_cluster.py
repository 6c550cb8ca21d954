"""Clusters by name and by file, their links, and what their errors say."""

import json
import math
from dataclasses import replace

import jax
import pytest

import autoshard
from autoshard.cluster import CATALOGUE, Cluster, join
from autoshard.errors import ClusterError
from autoshard.ir import Mesh

CLUSTERS = (
    *("v4:2x2x1", "v5e:4x4", "v5e:16x16", "v5p:4x4x8", "v6e:2x4"),
    *("a100:8", "a100-40g:4", "h100:8x4", "h200:8x2", "b200:8x16", "cpu:8"),
    *(f"{name}:{'x'.join(map(str, entry.topologies[-1]))}" if entry.topologies else f"{name}:6" for name, entry in CATALOGUE.items()),
)


def mesh(*sizes):
    return Mesh(tuple((f"a{axis}", size) for axis, size in enumerate(sizes)))


@pytest.mark.parametrize("text", CLUSTERS)
def test_every_form_round_trips(text, tmp_path):
    """Name, dict, JSON and TOML each give the cluster back."""
    cluster = Cluster.parse(text)
    assert cluster.name == str(cluster) == text
    assert cluster.n_devices == math.prod(cluster.topology)
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster
    cluster.save(tmp_path / "cluster.toml")
    assert Cluster.load(tmp_path / "cluster.toml") == cluster


@pytest.mark.parametrize("name", CATALOGUE)
def test_entries_are_plausible(name):
    """Every entry names its source, computes narrow types at least as fast as wide ones, and offers most of its memory."""
    device = CATALOGUE[name].device
    assert device.source and CATALOGUE[name].interconnect.source
    assert device.matrix_rate("int8") >= device.matrix_rate("float32") >= device.matrix_rate("float64")
    assert device.matrix_rate("complex64") == device.matrix_rate("float32") / 4
    assert device.matrix_rate("int32") == device.vector_rate("int32")
    for topology in CATALOGUE[name].topologies:
        assert Cluster.parse(f"{name}:{'x'.join(map(str, topology))}").topology[: len(topology)] == topology


def test_memory_limit_leaves_a_reserve():
    """A GPU program gets what jax allocates, a TPU program what the compiler says there is."""
    assert Cluster.parse("h100:8").memory_limit_bytes == 60e9
    assert Cluster.parse("v5e:4x4").memory_limit_bytes == 15.75 * 2**30
    assert Cluster.parse("v6e:4x4").memory_limit_bytes == 31.25 * 2**30


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("v5e:2x3", ("v5e slice", "2x4", "'v5e:2x3'")),
        ("v5e:4x4x4", ("v5e slice", "16x16")),
        ("v5p:4x4x6", ("2x2x1", "multiples of 4")),
        ("v5p:8x4x4", ("rising",)),
        ("v5p:32x32x32", ("6144",)),
        ("h100:16", ("at most 8", "'h100:8x4'")),
        ("cpu:2x4", ("'cpu:8'",)),
        ("cpu:0", ("at least 1",)),
        ("nosuch:8", ("v5e", "h100", "Cluster.load")),
        ("h100", ("'cpu:8'", "h200")),
        ("cpu:" + "9" * 50, ("'cpu:8'",)),
        (None, ("None",)),
    ],
)
def test_bad_names_say_what_is_allowed(text, pieces):
    """An unknown device lists the catalogue, a bad topology the ones that exist."""
    with pytest.raises(ClusterError) as error:
        Cluster.parse(text)
    assert all(piece in str(error.value) for piece in pieces)


def test_a_mesh_covers_all_devices():
    """A mesh of another size than the cluster is an error that names both."""
    with pytest.raises(ClusterError, match=r"covers all devices: v5e:4x4 has 16, the mesh a0=4 x a1=2 has 8"):
        Cluster.parse("v5e:4x4").links(mesh(4, 2))


def test_a_file_may_start_from_a_known_cluster(tmp_path):
    """A written file overrides single fields of a named cluster."""
    path = tmp_path / "cluster.toml"
    path.write_text('cluster = "h100:8x2"\nname = "ours"\n[interconnect]\nnetwork_bandwidth_bytes_per_second = 25e9\n')
    cluster = Cluster.load(path)
    assert (cluster.name, cluster.device.name, cluster.interconnect.network_bandwidth_bytes_per_second) == ("ours", "h100", 25e9)


def test_a_file_with_another_memory_leaves_programs_the_same_share(tmp_path):
    """The limit follows the memory, unless the file says otherwise."""
    path = tmp_path / "cluster.toml"
    path.write_text('cluster = "h100:8"\n[device]\nmemory_bytes = 40e9\n')
    assert Cluster.load(path).memory_limit_bytes == 30e9
    path.write_text('cluster = "h100:8"\nmemory_limit_bytes = 35000000000\n[device]\nmemory_bytes = 40e9\n')
    assert Cluster.load(path).memory_limit_bytes == 35e9
    path.write_text('cluster = "v5e:2x2"\n')
    assert Cluster.load(path) == Cluster.parse("v5e:2x2")


@pytest.mark.parametrize(
    ("content", "piece"),
    [
        ("name = ", "cannot be read"),
        ('cluster = "cpu:8"\nspeed = 3\n', "unknown: ['speed']"),
        ('name = "x"\n', "missing"),
        ('cluster = "cpu:8"\noverlap = 1\n', "true or false"),
        ('cluster = "cpu:8"\ntopology = []\n', "list of sizes"),
        ('cluster = "cpu:8"\ndevice = 3\n', "table of fields"),
        ('cluster = "cpu:8"\n[device]\nmemory_bytes = nan\n', "a number"),
        ('cluster = "cpu:8"\n[device]\nvector_flops_per_second = 0\n', "positive"),
        ('cluster = "cpu:8"\nmemory_limit_bytes = 0\n', "positive"),
        ('cluster = "a100:8"\ntopology = [8, 2]\n[interconnect]\nnetwork_bandwidth_bytes_per_second = 0\n', "several hosts"),
        ("cluster = 8\n", "got 8"),
    ],
)
def test_bad_files_say_what_is_wrong(content, piece, tmp_path):
    """A damaged or wrong file is one error that names the field."""
    path = tmp_path / "cluster.toml"
    path.write_text(content)
    with pytest.raises(ClusterError) as error:
        Cluster.load(path)
    assert piece in str(error.value)


def test_hostile_dicts_are_refused():
    """Huge integers and wrong types in JSON are errors, never exceptions of another kind."""
    data = Cluster.parse("cpu:8").to_dict()
    for key, value in (("topology", [10**400]), ("memory_limit_bytes", 10**400), ("name", None), ("device", []), ("interconnect", None)):
        with pytest.raises(ClusterError):
            Cluster.from_dict({**data, key: value})
    with pytest.raises(ClusterError):
        Cluster.from_dict([])


def test_local_is_this_process():
    """The virtual devices of the tests are a cpu cluster."""
    assert Cluster.local() == Cluster.parse(f"cpu:{len(jax.devices())}")


class FakeDevice:
    def __init__(self, platform, device_kind, process_index=0, coords=None):
        self.platform, self.device_kind, self.process_index, self.coords = platform, device_kind, process_index, coords


@pytest.mark.parametrize(
    ("devices", "name"),
    [
        ([FakeDevice("gpu", "NVIDIA H100 80GB HBM3", i // 8) for i in range(16)], "h100:8x2"),
        ([FakeDevice("gpu", "NVIDIA H200")], "h200:1"),
        ([FakeDevice("tpu", "TPU v5 lite", 0, (x, y, 0)) for x in range(4) for y in range(2)], "v5e:2x4"),
        ([FakeDevice("tpu", "TPU v4", 0, (x, y, 0)) for x in range(2) for y in range(2)], "v4:2x2x1"),
    ],
)
def test_local_knows_accelerators_by_their_kind(devices, name, monkeypatch):
    """Accelerators are found in the catalogue, hosts counted by process, slices measured by coordinates."""
    monkeypatch.setattr("jax.devices", lambda: devices)
    assert Cluster.local().name == name


def test_unknown_devices_have_another_ones_figures_and_say_so(monkeypatch):
    """A device outside the catalogue is described by one of its platform; a note in every strategy asks to measure it."""
    monkeypatch.setattr("jax.devices", lambda: [FakeDevice("gpu", "NVIDIA GeForce GTX 970", i // 2) for i in range(4)])
    found = Cluster.local()
    assert (found.name, found.n_devices, found.device.matrix_rate("float32")) == (
        "nvidia-geforce-gtx-970:2x2",
        4,
        CATALOGUE["a100"].device.matrix_rate("float32"),
    )
    assert found.note.startswith("nvidia-geforce-gtx-970 is not in the catalogue: figures are those of a100. Measure")
    strategy = autoshard.search(lambda x: x + 1, jax.ShapeDtypeStruct((8,), "float32"), cluster=found)
    assert found.note in strategy.notes and not Cluster.parse("h100:8").note


def test_hosts_are_told_by_boot_and_racks_by_their_size(monkeypatch):
    """One process a GPU is not one host a GPU; trays of a rack are of one domain; unequal hosts are an error."""

    def gpus(kind, counts, per_process=1):
        found = [FakeDevice("gpu", kind, number // per_process) for number in range(sum(counts))]
        for device, host in zip(found, (host for host, count in enumerate(counts) for _ in range(count)), strict=True):
            device.slice_index = host
        return found

    assert Cluster.of_devices(gpus("NVIDIA H100 80GB HBM3", [8, 8])).name == "h100:8x2"
    assert Cluster.of_devices(gpus("NVIDIA GB200", [4] * 18)).name == "gb200:72"
    assert Cluster.of_devices(gpus("NVIDIA GB200", [4] * 36)).name == "gb200:72x2"
    with pytest.raises(ClusterError, match=r"equally many devices, and these 12 are 8 or 4 of a host\. Use"):
        Cluster.of_devices(gpus("NVIDIA H100 80GB HBM3", [8, 4]))


def test_two_devices_of_a_chip_share_its_links():
    """An axis within chips is six times as fast as a link of a chip; one along a dimension has half of the chip's."""
    cluster = Cluster.parse("tpu7x:4x4x4")
    rows, chips = cluster.links(mesh(64, 2))
    assert cluster.n_devices == 128 and cluster.name == "tpu7x:4x4x4" and cluster.rings == (True, True, True, False)
    assert chips.bandwidth_bytes_per_second == 600e9 and rows.inside.bandwidth_bytes_per_second == 3 * 2 * 50e9


def test_the_innermost_axis_gets_the_nearest_devices():
    """On hosts of GPUs the last mesh axis stays inside a host and the first one uses the network."""
    outer, inner = Cluster.parse("h100:8x4").links(mesh(4, 8))
    assert (outer.kind, inner.kind) == ("network", "switch")
    assert outer.bandwidth_bytes_per_second == 48e9 < inner.bandwidth_bytes_per_second == 18 * 20.6e9
    (both,) = Cluster.parse("h100:8x4").links(mesh(32))
    assert both.kind == "network" and both.bandwidth_bytes_per_second <= inner.bandwidth_bytes_per_second
    assert both.exchange_bandwidth_bytes_per_second == pytest.approx(48e9 / (3 / 4))  # three quarters of everything leave the host


@pytest.mark.parametrize(
    ("text", "sizes", "rings"),
    [
        ("v5e:4x4", (4, 4), (False, False)),  # 4 of 16: no wrap-around
        ("v5e:8x16", (8, 16), (False, True)),
        ("v5e:16x16", (16, 16), (True, True)),
        ("v5p:4x4x8", (16, 8), (True, True)),
        ("v5p:2x4x4", (8, 4), (False, False)),  # less than a cube
        ("v5p:4x4x4", (4, 8, 2), (True, True, False)),  # every other device still makes a ring, neighbours do not
    ],
)
def test_rings_close_where_the_slice_does(text, sizes, rings):
    """TPU links wrap on full axes of 16 (v5e, v6e) or in whole 4x4x4 cubes (v4, v5p)."""
    assert tuple(link.wrap for link in Cluster.parse(text).links(mesh(*sizes))) == rings


def test_a_strided_axis_shares_its_links():
    """The outer half of a torus dimension hops over, and shares links with, the inner one."""
    _, inner = Cluster.parse("v5e:2x4").links(mesh(4, 2))
    assert inner.bandwidth_bytes_per_second == 45e9
    assert inner.exchange_bandwidth_bytes_per_second == 90e9  # two devices send half of b each, over one link
    (_, strided, _) = Cluster.parse("v5e:2x4").links(mesh(2, 2, 2))
    assert strided.bandwidth_bytes_per_second == 22.5e9
    assert strided.latency_seconds == 2 * inner.latency_seconds


@pytest.mark.parametrize("text", CLUSTERS)
def test_joined_axes_are_the_whole_cluster(text):
    """However a mesh is cut, all its axes together are one axis over all devices."""
    cluster = Cluster.parse(text)
    (whole,) = cluster.links(mesh(cluster.n_devices))
    sizes = tuple(cluster.topology[::-1] if cluster.device.kind == "gpu" else cluster.topology)
    for cut in (sizes, (2, cluster.n_devices // 2), (cluster.n_devices // 2, 2), (2, 1, cluster.n_devices // 2)):
        joined = join(cluster.links(mesh(*cut)))
        assert (joined.size, joined.wrap, joined.kind) == (whole.size, whole.wrap, whole.kind)
        assert joined.bandwidth_bytes_per_second == pytest.approx(whole.bandwidth_bytes_per_second)
        assert joined.exchange_bandwidth_bytes_per_second == pytest.approx(whole.exchange_bandwidth_bytes_per_second)
        assert joined.latency_seconds == pytest.approx(whole.latency_seconds)


def test_meshes_that_cut_across_hosts_are_slower():
    """An axis that the topology does not divide is placed all the same, at a price."""
    straight, across = (Cluster.parse("h100:8x3").links(mesh(*sizes)) for sizes in ((3, 8), (2, 12)))
    assert across[1].kind == "network"
    assert across[1].bandwidth_bytes_per_second < straight[1].bandwidth_bytes_per_second
    assert math.prod(link.size for link in across) == 24


@pytest.mark.parametrize(
    ("made", "pieces"),
    [
        (lambda: Cluster.parse("cpu:99999999"), ["at most 1,048,576 devices", "99,999,999"]),
        (lambda: Cluster.parse("h100:8x99999999999"), ["at most 1,048,576 devices"]),
        (lambda: replace(Cluster.parse("h100:8").device, processors=-1), ["positive", "processors=-1"]),
        (lambda: replace(Cluster.parse("h100:8").interconnect, copy_bandwidth_bytes_per_second=-1.0), ["not negative"]),
    ],
)
def test_sizes_and_rates_that_nothing_has_are_refused(made, pieces):
    """At once, however large they are."""
    with pytest.raises(ClusterError) as caught:
        made()
    assert all(piece in str(caught.value) for piece in pieces)


@pytest.mark.parametrize("text", CLUSTERS)
def test_parts_of_a_cluster_are_neighbours_and_cover_it(text):
    """A part is a run of devices in row-major order, as large as it should be, no faster inside than the whole cluster is there."""
    cluster = Cluster.parse(text)
    for n in (1, 2, 4):
        try:
            part = cluster.part(n)
        except ClusterError:
            assert cluster.n_devices % n or math.gcd(cluster.dimensions[0], n) < min(n, cluster.dimensions[0])
            continue
        assert part.n_devices * n == cluster.n_devices
        inside = cluster.links(mesh(n, part.n_devices))[-1:]
        for own, link in zip(part.links(mesh(part.n_devices)), inside, strict=False):
            assert own.bandwidth_bytes_per_second <= link.bandwidth_bytes_per_second
            assert own.hosts == link.hosts


def test_parts_that_cut_a_host_unevenly_are_refused():
    """Three hosts have no two equal parts of neighbours."""
    with pytest.raises(ClusterError, match=r"dimensions \(3, 8\), outermost first, has no 2 of them. Use 3, 6, 12 or 24.$"):
        Cluster.parse("h100:8x3").part(2)
