"""Times of ranks meet in a store, which stays small."""

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.distributed import HashStore  # noqa: E402

from real.watching.exchange import StoreExchange, WatchNews, WindowPost, common_times  # noqa: E402
from real.watching.tracing import TraceMark  # noqa: E402
from real.watching.work import StepWork  # noqa: E402
from simdist.errors import RunError  # noqa: E402


def post(steps: range, work_s: float = 0.5, *, is_last: bool = False) -> WindowPost:
    return WindowPost(tuple(StepWork(step, work_s, 1.0) for step in steps), is_last)


def test_posts_and_news_are_read_as_they_were_written() -> None:
    sent = post(range(3, 6), 0.125, is_last=True)
    assert WindowPost.from_text(sent.to_text().encode()) == sent
    for news in (WatchNews(4, TraceMark(130, 2, "persistent")), WatchNews(0, None, is_off=True)):
        assert WatchNews.from_text(news.to_text().encode()) == news


def test_times_are_deleted_once_rank_0_has_read_them() -> None:
    store = HashStore()
    ranks = [StoreExchange(store, rank, 3) for rank in range(3)]
    n_before = store.num_keys()
    for window in range(20):
        for rank in (1, 2):
            ranks[rank].post(window, post(range(10 * window, 10 * window + 10)))
            ranks[rank].news()
        found = ranks[0].gather(window, lambda: True)
        assert sorted(found) == [1, 2]
        ranks[0].publish(WatchNews(window, None))
    assert store.num_keys() - n_before <= 1 + 2 * 2


def test_ranks_that_have_not_come_are_silent_and_those_that_ended_are_not() -> None:
    store = HashStore()
    ranks = [StoreExchange(store, rank, 4) for rank in range(4)]
    ranks[1].post(0, post(range(5), is_last=True))
    ranks[2].post(0, post(range(10)))
    found = ranks[0].gather(0, lambda: True)
    assert sorted(found) == [1, 2]
    assert ranks[0].silent(found) == [3]


def test_a_second_watch_has_keys_of_its_own() -> None:
    store = HashStore()
    for number in range(2):
        first, second = (StoreExchange(store, rank, 2) for rank in range(2))
        assert first.gather(0, lambda: True) == {}
        second.post(0, post(range(number, 10)))
        assert len(first.gather(0, lambda: True)[1].steps) == 10 - number


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=5))
def test_each_step_of_several_ranks_is_in_one_table(spans: list[tuple[int, int]]) -> None:
    posts = {rank: post(range(first, first + n), rank) for rank, (first, n) in enumerate(spans)}
    ranks_of = {
        step: tuple(rank for rank, (first, n) in enumerate(spans) if first <= step < first + n) for step in range(12)
    }
    n_with_steps = sum(n > 0 for _, n in spans)
    expected = {step: ranks for step, ranks in ranks_of.items() if len(ranks) >= min(2, max(1, n_with_steps))}
    if n_with_steps and not expected:
        with pytest.raises(RunError, match="ranks count different steps"):
            common_times(posts)
        return
    tables = common_times(posts)
    assert {step: each.ranks for each in tables for step in each.steps} == expected
    for each in tables:
        assert each.work_s.shape == (len(each.steps), len(each.ranks))
        assert (each.work_s == each.ranks).all()
