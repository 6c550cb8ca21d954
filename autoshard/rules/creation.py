"""Rules of primitives that create arrays without operands, or from random keys."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.ir import Factor, Rule, Value
from autoshard.rules.registry import assemble, broadcast, free, rule, whole


@rule("iota", "iota_2x32_shape", "empty", "empty2")
def iota(*sizes: Value, results: tuple[Value, ...], **_) -> Rule:
    """Every dimension is a factor of the result alone: ``()->([i, j])``."""
    dims = free(results[0].shape)
    return assemble([[] for _ in sizes], [dims] * len(results))


@rule("random_bits", "random_split")
def random_bits(keys: Value, /, *, results: tuple[Value, ...], **_) -> Rule:
    """The keys' dimensions are shared; those drawn from one key are factors of the result alone: ``([i])->([i, j])``.

    Threefry hashes every element's position, so each shard draws its own (`jax_threefry_partitionable`, JAX's default). Other generators
    have one sequential stream, which is drawn whole.
    """
    drawn, dims = results[0].shape[keys.rank :], _of_keys(keys, keys.shape)
    return assemble([dims], [[*dims, *_of_keys(keys, drawn)]])


@rule("random_fold_in")
def random_fold_in(keys: Value, data: Value, /, *, results: tuple[Value, ...], **_) -> Rule:
    """Elementwise in keys and data, where each key has a stream of its own: ``([i], [i])->([i])``."""
    dims = _of_keys(keys, results[0].shape)
    return assemble([broadcast(keys, dims), broadcast(data, dims)], [dims])


@rule("random_gamma")
def random_gamma(keys: Value, shape: Value, /, *, results: tuple[Value, ...], **_) -> Rule:
    """The keys' dimensions are shared; samples of one key stay whole, since each one's own key depends on its position."""
    dims = _of_keys(keys, keys.shape)
    drawn = [*dims, *whole(shape.shape[keys.rank :])]
    return assemble([dims, drawn], [drawn])


def _of_keys(keys: Value, shape: Sequence[int]) -> list[Factor]:
    """A new factor for each dimension of keys or of what is drawn: free for threefry alone.

    Of keys of other generators in a batch JAX draws from the first one's stream alone.
    """
    return free(shape) if keys.dtype == "key<fry>" else whole(shape)


@rule("rng_bit_generator", "rng_uniform")
def rng(*operands: Value, results: tuple[Value, ...], **_) -> Rule:
    """One sequential stream, drawn whole."""
    return assemble([whole(operand.shape) for operand in operands], [whole(result.shape) for result in results])
