"""Clusters as trees: several slices on a data-centre network, pods of hosts on a spine."""

import json
import math
from dataclasses import replace

import pytest

from autoshard.cluster import Cluster, Level, join
from autoshard.errors import ClusterError
from autoshard.ir import Mesh, Placement

TREES = ("2*v5e:4x4", "3*v5p:4x4x4", "16*v6e:16x16", "4*h100:8x16", "2*cpu:4")


def mesh(*sizes):
    return Mesh(tuple((f"a{axis}", size) for axis, size in enumerate(sizes)))


@pytest.mark.parametrize("text", TREES)
def test_every_tree_round_trips(text, tmp_path):
    """Name, the other form of it, dict, JSON and TOML each give the cluster back."""
    cluster = Cluster.parse(text)
    n, one = text.split("*")
    assert cluster == Cluster.parse(f"{one}*{n}") and cluster.name == text
    assert cluster.n_devices == int(n) * Cluster.parse(one).n_devices == math.prod(cluster.dimensions)
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster
    cluster.save(tmp_path / "cluster.toml")
    assert Cluster.load(tmp_path / "cluster.toml") == cluster
    assert cluster.part(int(n)) == Cluster.parse(one) == Cluster.parse(f"1*{one}")


def test_clusters_of_one_slice_are_written_as_before():
    """Files without levels are read, and written the same."""
    assert "levels" not in Cluster.parse("v5e:4x4").to_dict()


def test_files_describe_trees_of_any_depth(tmp_path):
    """Levels are added to a known cluster, or fields of its own ones changed, and the number of devices is checked."""
    path = tmp_path / "cluster.toml"
    spine = '[[levels]]\nname = "pods"\nsize = 3\nbandwidth_bytes_per_second = 48e9\nlatency_seconds = 2e-5\noversubscription = 7\n'
    path.write_text(f'cluster = "h100:8x4"\nname = "ours"\ndevices = 96\n{spine}{spine.replace("3", "1")}')
    cluster = Cluster.load(path)
    assert cluster.dimensions == (3, 1, 4, 8) and cluster.levels[0].device_bytes_per_second == pytest.approx(48e9 / 7)
    path.write_text('cluster = "2*v5e:4x4"\n[[levels]]\nsharing = 4\n')
    assert Cluster.load(path).levels == (replace(Cluster.parse("2*v5e:4x4").levels[0], sharing=4),)


@pytest.mark.parametrize(
    ("content", "pieces"),
    [
        ('cluster = "2*v5e:4x4"\ndevices = 64\n', ["multiply to its devices", "2 slices x 4 x 4, 32 in all", "devices = 64", "Correct"]),
        ('cluster = "2*v5e:4x4"\n[[levels]]\nbandwidth_bytes_per_second = 0\n', ["has a bandwidth", "'slices'", "got 0.0", "Give"]),
        ('cluster = "v5e:4x4"\n[[levels]]\nname = "slices"\n', ["missing: ['bandwidth_bytes_per_second', 'latency_seconds', 'size']"]),
        ('cluster = "2*v5e:4x4"\n[[levels]]\noversubscription = 0.5\n', ["at least 1", "oversubscription=0.5"]),
        ('cluster = "2*v5e:4x4"\n[[levels]]\nkind = "ring"\n', ["'switch', 'rails'", "'ring'"]),
        ('cluster = "2*v5e:4x4"\nlevels = 3\n', ["a list of levels"]),
        ('cluster = "2*v5e:4x4*2"\n', ["'2*v5e:4x4' or 'v5e:4x4*2'"]),
        ('cluster = "0*v5e:4x4"\n', ["at least one"]),
    ],
)
def test_bad_trees_say_what_is_wrong(content, pieces, tmp_path):
    """Sizes that do not multiply, levels without bandwidth and other mistakes are one paragraph."""
    path = tmp_path / "cluster.toml"
    path.write_text(content)
    with pytest.raises(ClusterError) as error:
        Cluster.load(path)
    assert all(piece in str(error.value) for piece in pieces) and "\n" not in str(error.value)


class FakeTpu:
    device_kind = "TPU v5 lite"
    platform = "tpu"
    process_index = 0

    def __init__(self, coords, slice_index):
        self.coords, self.slice_index = coords, slice_index


def slices(*shapes):
    return [FakeTpu((x, y, 0), number) for number, (m, n) in enumerate(shapes) for x in range(m) for y in range(n)]


def test_local_sees_slices(monkeypatch):
    """Devices of several slices are a cluster of them; unequal slices are an error that names them."""
    monkeypatch.setattr("jax.devices", lambda: slices((2, 4), (2, 4)))
    assert Cluster.local().name == "2*v5e:2x4"
    monkeypatch.setattr("jax.devices", lambda: slices((2, 4), (2, 2)))
    with pytest.raises(ClusterError, match=r"equal ones, and these 12 devices are slices of 2x4, 2x2\. Search"):
        Cluster.local()


def test_links_know_what_they_cross():
    """An axis is within slices, across them, or both; a placement puts any axis across."""
    cluster = Cluster.parse("2*v5e:4x4")
    outer, inner = cluster.links(mesh(2, 16))
    assert [(level.name, n) for level, n in outer.crossed] == [("slices", 2)] and outer.inside.size == 1 and outer.kind == "network"
    assert not inner.crossed and inner.inside == Cluster.parse("v5e:4x4").links(mesh(16))[0]
    (whole,) = cluster.links(mesh(32))
    assert whole.inside.size == 16 and join([outer, inner]) == whole
    _, last = cluster.links(replace(mesh(16, 2), placement=Placement((2, 4, 4), (1, 2, 0), (0, 1))))
    assert last.crossed and last.inside.size == 1


def test_all_devices_of_a_host_share_its_cards():
    """A level's rate for a device is its endpoint's, over the devices that share it and over the oversubscription."""
    level = Level("pods", 2, 100e9, 1e-5, sharing=8, oversubscription=2.0)
    assert level.device_bytes_per_second == 100e9 / 16
    assert Cluster.parse("2*v5e:16x16").levels[0].device_bytes_per_second == 25e9 / 8  # 6.4 Tb/s a pod of 256


@pytest.mark.sample(1)
@pytest.mark.parametrize("lowering", ["manual", "constraints"])
def test_programs_on_slices_compute_the_same(lowering):
    """A train step searched for two slices gives the whole step's numbers; the slice axis is used."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import autoshard

    def train_step(w, x):
        gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return w - gradient

    w, x = (jax.random.normal(jax.random.key(k), shape) for k, shape in enumerate([(16, 16), (64, 16)]))
    strategy = autoshard.search(train_step, w, x, cluster="2*cpu:4", mesh={"slice": 2, "data": 4}, batch_axes=("slice", "data"))
    assert {axis for each in strategy.cost.collectives for axis in each.mesh_axes} == {"slice", "data"}
    step = strategy.apply(train_step, lowering=lowering)
    np.testing.assert_allclose(step(*strategy.shard(w, x)), train_step(w, x), rtol=1e-5, atol=1e-6)


def test_state_is_sharded_within_slices_and_replicated_across_where_that_is_best():
    """Hybrid sharding is found unprompted: gathers stay within a slice, and a quarter of each gradient is summed across."""
    import jax
    import jax.numpy as jnp

    import autoshard

    def train_step(state, x):
        w, mean, square = state

        @jax.checkpoint
        def layer(x, w):
            return jnp.tanh(x @ w.astype(jnp.bfloat16)), None

        gradient = jax.grad(lambda w: jnp.mean(jax.lax.scan(layer, x, w)[0].astype(jnp.float32) ** 2))(w)
        mean, square = 0.9 * mean + gradient, 0.99 * square + gradient**2
        return w - mean / (jnp.sqrt(square) + 1e-8), mean, square

    w, x = jax.ShapeDtypeStruct((4, 4096, 4096), "float32"), jax.ShapeDtypeStruct((2**17, 4096), "bfloat16")
    strategy = autoshard.search(train_step, (w, w, w), x, cluster="2*v5e:2x2", donate_argnums=0)
    links = Cluster.from_dict(strategy.record.cluster).links(strategy.record.mesh)
    across, within = sorted(strategy.record.mesh.names, key=lambda name: -len(links[strategy.record.mesh.names.index(name)].crossed))
    assert strategy.mesh_shape == {across: 2, within: 4}
    assert {axis for spec in strategy.in_specs[0] for axis in spec} == {None, within}
    sums = {each.mesh_axes: each.bytes for each in strategy.cost.collectives if each.kind == "all_reduce"}
    assert sums[across,] == 2 * 4096**2 / 4
