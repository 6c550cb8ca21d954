"""Schedules of pipelines as their papers and programs construct them, to compare with those that are found."""

from __future__ import annotations

from autoshard.pipeline.schedule import Schedule


def gpipe(n_stages: int, n: int) -> Schedule:
    """All forward tasks, then all backward tasks (Huang et al., GPipe, 2019)."""
    return Schedule.of_words("gpipe", ["F" * n + "B" * n] * n_stages)


def one_forward_one_backward(n_stages: int, n: int) -> Schedule:
    """``S - s`` microbatches in flight on stage ``s`` (Narayanan et al., PipeDream, 2019)."""
    warm = [min(n_stages - 1 - s, n) for s in range(n_stages)]
    return Schedule.of_words("1f1b", ["F" * k + "FB" * (n - k) + "B" * k for k in warm])


def interleaved(n_stages: int, n: int, chunks: int) -> Schedule:
    """Megatron-LM's: chunk by chunk in groups of as many microbatches as there are stages (Narayanan et al., 2021, section 2.2)."""
    names = "abcdefghijkl"[:chunks]
    forward = [f"F{c}" for _ in range(n // n_stages) for c in names for _ in range(n_stages)]
    backward = [f"B{c}" for _ in range(n // n_stages) for c in names[::-1] for _ in range(n_stages)]
    words = []
    for stage in range(n_stages):
        warm = min(2 * (n_stages - 1 - stage) + (chunks - 1) * n_stages, len(forward))
        turns = [task for pair in zip(forward[warm:], backward, strict=False) for task in pair]
        words.append("".join([*forward[:warm], *turns, *backward[len(forward) - warm :]]))
    return Schedule.of_words("interleaved", words, chunks)


def zb_h1(n_stages: int, n: int) -> Schedule:
    """1F1B in which stage ``s`` computes gradients of weights ``s`` microbatches later (Qi et al., Zero Bubble, 2023, section 3)."""
    words = []
    for stage in range(n_stages):
        warm, late = min(n_stages - stage, n), 0
        word = "F" * warm
        for i in range(n):
            word += "B"
            if i - late >= stage or warm + i >= n:
                word, late = word + "W", late + 1
            word += "F" * (warm + i < n)
        words.append(word + "W" * (n - late))
    return Schedule.of_words("zb_h1", words)


def zb_v(n_stages: int, n: int) -> Schedule:
    """Two chunks in a V (Qi et al., Pipeline Parallelism with Controllable Memory, 2024, section 3), as PyTorch constructs it."""
    words = []
    for stage in range(n_stages):
        word, left = "Fa" * (2 * (n_stages - stage) - 1), n - (2 * (n_stages - stage) - 1)
        word, left = word + "FbFa" * stage, left - stage
        word += "FbBbWb" * (n_stages - stage)
        while word.count("Fb") < word.count("Fa") or left:
            word, left = word + "Fa" * (left > 0) + "BaWaFbBbWb", max(left - 1, 0)
        weights_a, weights_b = word.count("Wa"), word.count("Wb")
        word += "BaBb" * stage + "BaWa" * (n_stages - stage)
        word += "Wb" * (n - weights_b) + "Wa" * (n - weights_a - (n_stages - stage))
        words.append(word)
    return Schedule.of_words("zb_v", words, 2, "v")


def dual_pipe_v(n_stages: int, n: int) -> Schedule:
    """DeepSeek's DualPipeV (github.com/deepseek-ai/DualPipe, dualpipev.py), where a forward task beside a backward one comes before it.

    Backward tasks are in two parts where it has them so (zero bubble); else their gradients of weights come right after them.
    """
    words = []
    for s in range(n_stages):
        after = n_stages - s - 1
        word = "Fa" * (2 * after) + "FaFb" * (s + 1) + "BbWbFb" * after
        word += "FaBbWbFbBaWa" * (n - 2 * n_stages + s + 1) + "BbWbFbBaWa" * after
        late, splits = "", False
        for i in range(s + 1):
            splits = splits or (i == (s + 1) // 2 and s % 2 == 1)
            word, late = word + "Bb" + "Wb" * (not splits), late + "Wb" * splits
            splits = splits or (i == (s + 1) // 2 and s % 2 == 0)
            word, late = word + "Ba" + "Wa" * (not splits), late + "Wa" * splits
        for _ in range(after):
            word, late = word + late[:2] + "Ba", late[2:] + "Wa"
        words.append(word + late)
    return Schedule.of_words("dual_pipe_v", words, 2, "v")
