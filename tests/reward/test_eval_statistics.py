"""Bootstrap intervals against binomial theory and scipy; the paired test against cases with a known answer."""

import numpy as np
import pytest
from scipy import stats

from cosyvoice.evaluation.compare import compare_scores
from cosyvoice.evaluation.records import EvaluationError
from cosyvoice.evaluation.scoring import Scored
from cosyvoice.evaluation.statistics import bootstrap, bootstrap_all, paired_bootstrap


def test_interval_of_a_share_is_close_to_the_binomial_one():
    errors = np.r_[np.ones(60), np.zeros(240)]
    interval = bootstrap(errors, np.ones(300), resamples=20_000)
    # A bootstrap of zeros and ones is a binomial draw divided by its size.
    low, high = stats.binom(300, 0.2).ppf([0.025, 0.975]) / 300
    assert interval.value == 0.2
    assert interval.low == pytest.approx(low, abs=0.004)
    assert interval.high == pytest.approx(high, abs=0.004)


def test_interval_of_a_ratio_agrees_with_scipys_bootstrap():
    rng = np.random.default_rng(3)
    n_ref = rng.integers(4, 30, 200).astype(float)
    errors = rng.binomial(n_ref.astype(int), 0.1).astype(float)
    found = bootstrap(errors, n_ref, resamples=10_000, seed=1)
    expected = stats.bootstrap(
        (errors, n_ref),
        lambda e, n, axis: e.sum(axis) / n.sum(axis),
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=10_000,
        rng=np.random.default_rng(2),
    ).confidence_interval
    assert found.value == errors.sum() / n_ref.sum()
    assert found.low == pytest.approx(expected.low, abs=0.002)
    assert found.high == pytest.approx(expected.high, abs=0.002)


def test_equal_seeds_give_equal_intervals_and_others_do_not():
    errors = np.arange(50.0) % 3
    first = bootstrap(errors, np.full(50, 5.0), 500, seed=7)
    assert first == bootstrap(errors, np.full(50, 5.0), 500, seed=7)
    assert first != bootstrap(errors, np.full(50, 5.0), 500, seed=8)
    # The number of draws may cross the internal chunk size without a seam.
    assert bootstrap(errors, np.full(50, 5.0), 257, seed=7).value == first.value


def test_pooled_seeds_are_not_independent_utterances():
    errors = np.r_[np.ones(20), np.zeros(80)]
    one = bootstrap(errors, np.ones(100), 5000)
    copies = bootstrap(np.tile(errors, (4, 1)), np.ones((4, 100)), 5000)
    assert copies == one  # four equal runs carry no more evidence than one
    spread = bootstrap(np.stack([np.roll(errors, 25 * k) for k in range(4)]), np.ones((4, 100)), 5000)
    assert spread.high - spread.low < 0.7 * (one.high - one.low)


def test_paired_test_of_equal_systems_sees_no_difference():
    errors = np.arange(100.0) % 4
    test = paired_bootstrap((errors, np.full(100, 8.0)), (errors, np.full(100, 8.0)), 1000)
    assert (test.difference.value, test.difference.low, test.difference.high) == (0, 0, 0)
    assert test.p_value == 1.0


def test_paired_test_finds_a_small_even_gain_that_intervals_overlap_on():
    rng = np.random.default_rng(0)
    before = rng.integers(2, 20, 200).astype(float)
    after = before - 1
    n_ref = np.full(200, 20.0)
    test = paired_bootstrap((before, n_ref), (after, n_ref), 2000)
    assert test.before.low < test.after.high  # alone, neither interval excludes the other system
    np.testing.assert_allclose([test.difference.low, test.difference.high], -1 / 20)
    assert test.p_value == pytest.approx(2 / 2001)
    assert test.relative.value == pytest.approx(-200 / before.sum())


def test_p_value_matches_the_sign_test_for_shifts_of_one():
    # 60 utterances better by one error, 40 worse by one: each draw's difference is a binomial with p = .6.
    before = np.r_[np.ones(60), np.zeros(40)]
    after = 1 - before
    test = paired_bootstrap((before, np.ones(100)), (after, np.ones(100)), 20_000)
    expected = 2 * stats.binom(100, 0.6).cdf(50)  # share of draws in which as many are worse as better
    assert test.difference.value == pytest.approx(-0.2)
    assert test.p_value == pytest.approx(expected, abs=0.01)


def test_pooling_seeds_does_not_weigh_a_system_up():
    before, after = np.array([1.0, 2.0, 0.0]), np.array([0.0, 2.0, 1.0])
    ones = np.full(3, 10.0)
    single = paired_bootstrap((before, ones), (after, ones), 200)
    pooled = paired_bootstrap((before, ones), (np.tile(after, (3, 1)), np.tile(ones, (3, 1))), 200)
    np.testing.assert_allclose(pooled.difference.low, single.difference.low)
    np.testing.assert_allclose(pooled.after.value, single.after.value)


def test_a_perfect_system_before_has_no_relative_change():
    test = paired_bootstrap((np.zeros(5), np.ones(5)), (np.ones(5), np.ones(5)), 100)
    assert np.isnan(test.relative.value)
    assert test.difference.value == 1


@pytest.mark.parametrize(
    ("numerator", "denominator", "message"),
    [
        (np.zeros(0), np.zeros(0), "U > 0"),
        (np.zeros(3), np.ones(4), r"\[3, 4\] utterances"),
        (np.zeros(3), np.array([1.0, 0.0, 1.0]), "denominator <= 0"),
        (np.array([np.nan]), np.ones(1), "not finite"),
    ],
)
def test_bootstrap_refuses_bad_input(numerator, denominator, message):
    with pytest.raises(ValueError, match=message):
        bootstrap(numerator, denominator, 10)


def test_scores_of_one_set_share_their_draws():
    errors, rates = np.arange(40.0) % 5, np.arange(40.0) % 5 / 7
    together = bootstrap_all([(errors, np.full(40, 7.0)), (rates, np.ones(40))], 300, seed=4)
    assert together == [bootstrap(errors, np.full(40, 7.0), 300, 4), bootstrap(rates, np.ones(40), 300, 4)]
    np.testing.assert_allclose(together[0].low, together[1].low)


# Comparison of scored sets


def scored(name: str, errors: int, n_ref: int, seconds: float | None = 1.0, reference: str = "r") -> Scored:
    counts = {"rate": errors / n_ref, "substitutions": errors, "deletions": 0, "insertions": 0, "n_ref": n_ref}
    return Scored(name, reference, "t", "ok", seconds, "", {"seed_tts": counts, "corpus": counts})


def run(errors: list[int], seconds: float | None = 1.0) -> dict[str, Scored]:
    return {f"u{i}": scored(f"u{i}", e, 2 + i, seconds) for i, e in enumerate(errors)}


def test_comparison_pools_seeds_per_protocol():
    found = compare_scores([run([1, 0, 2])], [run([0, 0, 1], 1.5), run([1, 0, 0], 0.9)], resamples=100)
    corpus, seed_tts = found["metrics"]["corpus"], found["metrics"]["seed_tts"]
    assert found["n_seeds"] == {"before": 1, "after": 2}
    assert corpus["before"]["value"] == pytest.approx(3 / 9)
    assert corpus["after"]["value"] == pytest.approx(2 / 18)
    assert seed_tts["before"]["value"] == pytest.approx((1 / 2 + 0 + 2 / 4) / 3)
    assert seed_tts["after"]["value"] == pytest.approx((0.25 + 0 + 0.125) / 3)
    assert found["duration_ratio"]["value"] == pytest.approx(1.2)


def test_comparison_leaves_out_and_counts_what_a_run_lacks():
    shorter = run([0, 0, 0])
    del shorter["u1"]
    found = compare_scores([run([1, 1, 1], None)], [shorter], resamples=50)
    assert (found["n_utterances"], found["n_left_out"]) == (2, 1)
    assert found["metrics"]["corpus"]["before"]["value"] == pytest.approx(2 / 6)
    assert found["duration_ratio"] is None


def test_comparison_refuses_different_references_and_disjoint_sets():
    other = {"u0": scored("u0", 0, 2, reference="another")}
    with pytest.raises(EvaluationError, match="'u0' has different references"):
        compare_scores([run([1])], [other])
    with pytest.raises(EvaluationError, match="no utterance in common"):
        compare_scores([run([1])], [{"z": scored("z", 0, 2)}])
    with pytest.raises(EvaluationError, match="0 and 1 runs"):
        compare_scores([], [run([1])])
