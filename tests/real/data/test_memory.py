"""Samples in memory: whole or not at all, although processes write, die or ask elsewhere; nothing is left behind."""

import errno
import os
import resource
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path

import numpy as np
import pytest
from processes import reserved_port, run, start
from timeouts import TIMEOUT_S
from watched_peers import WatchedPeers

from real.data import memory
from real.data.memory import Board, Geometry, MemoryStore, Want, wait_for
from real.data.peers import (
    HEAD,
    MOST_WAIT_S,
    PeerServer,
    connections_per_peer,
    most_connections,
    pack_wants,
    peer_key,
    unpack_wants,
)
from real.processes.messages import HELLO, hello, receive, send_message
from simdist.errors import RunError

NBYTES = 1000
SMALL = Geometry(n_samples=20, n_slots=4, sample_nbytes=NBYTES, ranks_per_node=2)
DATA_SET = bytes(range(32))
KEY = peer_key(b"token of the run", DATA_SET)
NEVER = threading.Event()


def pattern(sample, nbytes=NBYTES):
    """Return a sample whose every part tells which it is."""
    return np.random.default_rng(sample).integers(0, 256, nbytes, dtype=np.uint8)


def fetched(store, sample):
    out = np.zeros(NBYTES, np.uint8)
    return out if store.get(sample, out) else None


@pytest.fixture
def store(tmp_path):
    opened = MemoryStore(SMALL, folder=tmp_path)
    yield opened
    opened.close()


def test_sample_comes_back_as_it_was_put(store):
    assert store.put(7, pattern(7))
    assert (fetched(store, 7) == pattern(7)).all()
    assert fetched(store, 8) is None
    assert 7 in store
    assert 8 not in store
    assert len(store) == 1


def test_arrays_of_any_shape_are_samples_too(store):
    store.put(3, pattern(3).reshape(10, 100))
    out = np.zeros((2, 500), np.uint8)
    assert store.get_many([5, 3], [np.empty(NBYTES, np.uint8), out]) == [False, True]
    assert (out.reshape(-1) == pattern(3)).all()


@pytest.mark.parametrize(
    "wrong", [np.zeros(NBYTES - 1, np.uint8), np.zeros(NBYTES, np.int8), np.zeros((2, NBYTES), np.uint8)[:, ::2]]
)
def test_what_is_no_sample_is_refused_by_both(store, wrong):
    for act in (store.put, store.get):
        with pytest.raises(RunError, match=r"sample 2: .* must be contiguous uint8 of 1000 bytes"):
            act(2, wrong)
    assert len(store) == 0


def test_full_store_refuses_and_keeps_what_it_has(store):
    assert [store.put(sample, pattern(sample)) for sample in range(6)] == [True] * 4 + [False] * 2
    assert all((fetched(store, sample) == pattern(sample)).all() for sample in range(4))
    assert store.put(2, pattern(2))  # is there already
    assert store.evict(1)
    assert not store.evict(1)
    assert store.put(5, pattern(5))
    assert [sample in store for sample in range(6)] == [True, False, True, True, False, True]


def test_store_without_room_for_samples_is_a_board_only(tmp_path):
    store = MemoryStore(Geometry(20, 0, NBYTES), folder=tmp_path)
    assert not store.put(0, pattern(0))
    assert store.board.slowest() == 0
    store.close()


def test_sample_that_a_later_load_kept_again_does_not_leave(store):
    store.put(1, pattern(1), number=3)
    store.put(1, pattern(1), number=8)
    assert not store.evict(1, number=7)
    assert 1 in store
    assert store.evict(1, number=8)
    store.put(1, pattern(1), number=2)  # what was before it left is forgotten
    assert store.evict(1, number=2)


def test_reader_whose_sample_leaves_while_it_copies_does_not_get_it(store, monkeypatch):
    copy = np.copyto
    store.put(1, pattern(1))

    def copy_late(out, data):
        monkeypatch.setattr(np, "copyto", copy)
        store.evict(1)
        for sample in range(2, 6):
            assert store.put(sample, pattern(sample))
        copy(out, data)

    monkeypatch.setattr(np, "copyto", copy_late)
    assert fetched(store, 1) is None


def test_of_two_writers_of_a_sample_one_wins_and_the_other_leaves_no_trace(store, monkeypatch):
    copy = np.copyto

    def copy_late(out, data):
        monkeypatch.setattr(np, "copyto", copy)
        assert store.put(1, pattern(1), number=5)
        copy(out, data)

    monkeypatch.setattr(np, "copyto", copy_late)
    assert store.put(1, pattern(1), number=4)
    assert len(store) == 1
    assert not store.evict(1, number=4)
    assert all(store.put(sample, pattern(sample)) for sample in (2, 3, 4))


def test_threads_that_write_read_and_evict_see_whole_samples_only(tmp_path):
    store = MemoryStore(Geometry(50, 8, NBYTES), folder=tmp_path)

    def work(seed):
        draw = np.random.default_rng(seed)
        seen = 0
        for sample in draw.integers(0, 50, 300).tolist():
            store.put(sample, pattern(sample))
            if (found := fetched(store, sample)) is not None:
                assert (found == pattern(sample)).all()
                seen += 1
            store.evict(int(draw.integers(0, 50)))
        return seen

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(work, range(4))) > 100
    for sample in range(50):
        store.evict(sample)
    assert all(store.put(sample, pattern(sample)) for sample in range(8))  # no slot was lost
    store.close()


def test_reader_looks_at_a_slot_again_after_a_fence(store, monkeypatch):
    """Where processors change the order of reads, only the fences hold it: a sample that leaves at any is not there."""
    n_fences = []
    monkeypatch.setattr(memory, "_fence", lambda: n_fences.append(1))
    store.put(1, pattern(1))
    n_fences.clear()
    assert fetched(store, 1) is not None
    assert len(n_fences) == 3
    for last in range(3):
        left = iter(range(3))

        def leave(left=left, last=last):
            if next(left) == last:
                monkeypatch.setattr(memory, "_fence", lambda: None)
                store.evict(1)
                store.put(2, pattern(2))
                store.evict(2)

        store.put(1, pattern(1))
        monkeypatch.setattr(memory, "_fence", leave)
        assert fetched(store, 1) is None


def test_fence_is_one_where_reads_may_pass_each_other(monkeypatch):
    taken = []

    class Lock:
        def __enter__(self):
            taken.append("take")

        def __exit__(self, *_):
            taken.append("drop")

    monkeypatch.setattr(memory, "_KEEPS_ORDER", False)
    monkeypatch.setattr(memory.threading, "Lock", Lock)
    memory._fence()
    assert taken == ["take", "drop"] * 2


def put_own_half(path):
    """Put some samples, then those of the other process must come."""
    store = MemoryStore(BOTH, path=path)
    for sample in range(1, 40, 2):
        assert store.put(sample, pattern(sample))
    await_all(store, rank=1)
    store.close()


BOTH = Geometry(40, 40, NBYTES, 2)


def await_all(store, rank):
    store.board.n_kept[rank] = 1
    for sample in range(40):
        assert wait_for(Want(sample, sample % 2, 0), store.__contains__, store.board, wait_s=30, stop=NEVER)
        assert (fetched(store, sample) == pattern(sample)).all()


def test_two_processes_share_a_store_that_has_no_name(tmp_path):
    store = MemoryStore(BOTH, folder=tmp_path)
    with start(put_own_half, 1, store.path) as ranks:
        for sample in range(0, 40, 2):
            assert store.put(sample, pattern(sample))
        await_all(store, rank=0)
        ranks.wait()
    assert list(tmp_path.iterdir()) == []
    store.close()


def die_with_the_lock(path):
    store = MemoryStore(SMALL, path=path)
    with store._segment.locked():
        os.kill(os.getpid(), signal.SIGKILL)


def test_process_that_is_killed_inside_the_lock_lets_others_in(store):
    assert run(die_with_the_lock, 1, store.path)[0].code == -signal.SIGKILL
    assert store.put(1, pattern(1))


def test_store_that_does_not_fit_says_what_it_needs_and_what_there_is(tmp_path):
    huge = Geometry(20, 10**6, 10**12)
    with pytest.raises(RunError, match=r"1,000,000,\d{3},\d{3},\d{3},\d{3} bytes of shared memory .*, [\d,]+ are left"):
        MemoryStore(huge, folder=tmp_path)


def test_memory_is_taken_not_promised(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(memory.os, "posix_fallocate", refuse)
    with pytest.raises(RunError, match="No space left"):
        MemoryStore(SMALL, folder=tmp_path)


@pytest.mark.parametrize("where", [{"folder": Path("nowhere")}, {"path": "/proc/self/fd/987654"}])
def test_memory_that_is_not_there_is_named(where):
    with pytest.raises(RunError, match=f"{next(iter(where.values()))}: .* No such file"):
        MemoryStore(SMALL, **where)


def board_of(n_ranks, n_samples=4):
    return Board(*(np.zeros(n, np.int64) for n in (n_ranks, n_ranks, n_ranks, n_samples)), nullcontext)


def test_wait_ends_when_who_should_bring_the_sample_has_passed():
    board = board_of(2)
    board.n_kept[1] = 4
    assert not wait_for(Want(0, 1, 3), lambda _: False, board, wait_s=60, stop=NEVER)
    looks = iter([False, False, True])
    assert wait_for(Want(0, 1, 4), lambda _: next(looks), board, wait_s=60, stop=NEVER)


def test_wait_finds_a_sample_that_came_while_its_rank_passed():
    board, looks = board_of(1), iter([False, True])
    board.n_kept[0] = 5
    assert wait_for(Want(0, 0, 4), lambda _: next(looks), board, wait_s=60, stop=NEVER)


def test_wait_ends_when_time_is_over_or_the_run_is(monkeypatch):
    monkeypatch.setattr(memory, "_LOOK_AGAIN_S", 1e-4)
    assert not wait_for(Want(0, 0, 4), lambda _: False, board_of(1), wait_s=0.001, stop=NEVER)
    over = threading.Event()
    over.set()
    assert not wait_for(Want(0, 0, 4), lambda _: False, board_of(1), wait_s=60, stop=over)


@pytest.fixture
def peer(store):
    """Serve a store, and ask it."""
    before = set(threading.enumerate())
    with (
        PeerServer(store, host="127.0.0.1", key=KEY, timeout_s=60) as server,
        WatchedPeers(KEY, NBYTES, address_of=lambda _: server.address, timeout_s=60) as peers,
    ):
        yield server, peers
    assert set(threading.enumerate()) <= before


def asked(peers, *wants, wait_s=0.0, node=1):
    outs = [np.zeros(NBYTES, np.uint8) for _ in wants]
    there = peers.get_many(node, [Want(want) if isinstance(want, int) else want for want in wants], outs, wait_s=wait_s)
    return [out if found else None for out, found in zip(outs, there, strict=True)]


def test_peer_gives_what_it_has(store, peer):
    _, peers = peer
    for sample in (3, 5):
        store.put(sample, pattern(sample))
    for _ in range(2):  # over one connection
        three, four, five, outside = asked(peers, 3, 4, 5, 999)
        assert (three == pattern(3)).all()
        assert (five == pattern(5)).all()
        assert four is None
        assert outside is None
    assert peers.failures == {}


def test_threads_ask_a_peer_at_once(store, peer):
    _, peers = peer
    for sample in range(4):
        store.put(sample, pattern(sample))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: asked(peers, i % 4)[0], range(40)))
    assert all((each == pattern(i % 4)).all() for i, each in enumerate(found))


def test_peer_waits_for_a_sample_that_is_about_to_come(store, peer):
    _, peers = peer
    later = threading.Timer(0.05, lambda: store.put(2, pattern(2)))
    later.start()
    [found] = asked(peers, Want(2, local_rank=1, number=0), wait_s=30)
    later.join()
    assert (found == pattern(2)).all()


def test_peer_does_not_wait_for_a_sample_whose_load_is_over(store, peer):
    _, peers = peer
    store.board.n_kept[1] = 1
    assert asked(peers, Want(2, local_rank=1, number=0), wait_s=1e6) == [None]


def test_sample_that_leaves_while_it_is_sent_is_not_there(store, peer, monkeypatch):
    _, peers = peer
    store.put(2, pattern(2))

    def send_late(connection, buffers, *, deadline_s):
        if len(buffers) == 2:  # flags and a sample
            store.evict(2)
        send_message(connection, buffers, deadline_s=deadline_s)

    monkeypatch.setattr("real.data.peers.send_message", send_late)
    assert asked(peers, 2) == [None]


def test_peer_that_has_ended_has_nothing_and_is_given_up(store, peer):
    server, peers = peer
    store.put(2, pattern(2))
    assert asked(peers, 2)[0] is not None
    server.close()
    assert asked(peers, 2) == [None]
    assert list(peers.failures) == [1]
    assert asked(peers, 2) == [None]  # is left alone for a while


def test_peer_that_comes_back_at_another_address_is_found(store):
    store.put(2, pattern(2))
    servers = [PeerServer(store, host="127.0.0.1", key=KEY)]
    with WatchedPeers(KEY, NBYTES, address_of=lambda _: servers[-1].address, retry_s=0) as peers:
        assert asked(peers, 2)[0] is not None
        servers[0].close()
        assert asked(peers, 2) == [None]
        servers.append(PeerServer(store, host="127.0.0.1", key=KEY))
        assert asked(peers, 2)[0] is not None
    servers[1].close()


def test_an_address_without_a_server_is_refused():
    with reserved_port() as port, WatchedPeers(KEY, NBYTES, address_of=lambda _: f"127.0.0.1:{port}") as peers:
        assert asked(peers, 2, 3, node=7) == [None, None]
        assert isinstance(peers.failures[7], ConnectionRefusedError)


@pytest.fixture
def stranger():
    """Accept connections, and say what the test tells it to."""
    listener = socket.create_server(("127.0.0.1", 0))
    accepted = []

    def begin(words):
        def accept():
            connection, _ = listener.accept()
            accepted.append(connection)
            connection.sendall(words)

        thread = threading.Thread(target=accept)
        thread.start()
        return thread, f"127.0.0.1:{listener.getsockname()[1]}"

    yield begin
    for connection in accepted:
        connection.close()
    listener.close()


OTHER_RUN = peer_key(b"of another run, by chance on this port", DATA_SET)


@pytest.mark.parametrize(
    "words", [b"", hello(KEY, "server"), hello(KEY, "server") + b"\1" + b"x" * 10], ids=["mute", "idle", "half"]
)
def test_peer_that_hangs_is_given_up(stranger, words):
    thread, address = stranger(words)
    with WatchedPeers(KEY, NBYTES, address_of=lambda _: address, timeout_s=0.2) as peers:
        assert asked(peers, 2) == [None]
        assert isinstance(peers.failures[1], TimeoutError)
    thread.join()


def test_peer_that_is_something_else_is_given_up(stranger):
    thread, address = stranger(b"HTTP/1.1" + hello(KEY, "server")[8:])
    with WatchedPeers(KEY, NBYTES, address_of=lambda _: address) as peers:
        assert asked(peers, 2) == [None]
        assert "does not serve samples" in str(peers.failures[1])
    thread.join()


@pytest.mark.parametrize("token", [b"of another run, by chance on this port", b"token of the ruN"])
def test_peer_of_another_run_is_given_up(store, token):
    """Equal data sets, and a sample that is not ours: without a proof nothing is taken."""
    store.put(2, pattern(3))
    with (
        PeerServer(store, host="127.0.0.1", key=peer_key(token, DATA_SET)) as server,
        WatchedPeers(KEY, NBYTES, address_of=lambda _: server.address) as peers,
    ):
        assert asked(peers, 2) == [None]
        assert 1 in peers.failures


def test_stranger_whose_proof_is_wrong_is_given_up(stranger):
    thread, address = stranger(hello(OTHER_RUN, "server"))
    with WatchedPeers(KEY, NBYTES, address_of=lambda _: address) as peers:
        assert asked(peers, 2) == [None]
        assert str(peers.failures[1]) == "is not of this run, or has another data set"
    thread.join()


def test_client_that_repeats_what_a_server_says_is_no_server(stranger):
    thread, address = stranger(hello(KEY, "client"))
    with WatchedPeers(KEY, NBYTES, address_of=lambda _: address) as peers:
        assert asked(peers, 2) == [None]
        assert "is not of this run" in str(peers.failures[1])
    thread.join()


def test_server_says_nothing_to_who_is_not_of_the_run(store, peer):
    server, _ = peer
    host, port = server.address.split(":")
    for words in (bytes(HELLO.size), hello(OTHER_RUN, "client"), hello(KEY, "server")):
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(words + HEAD.pack(1, 0.0) + pack_wants([Want(2)]))
            assert received_until_the_end(connection) == b""


@pytest.mark.parametrize("wait_s", [float("nan"), float("inf"), -1.0, 2 * MOST_WAIT_S])
def test_server_refuses_to_wait_for_what_is_no_time(store, peer, wait_s):
    server, _ = peer
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(hello(KEY, "client") + HEAD.pack(1, wait_s) + pack_wants([Want(2, local_rank=1, number=0)]))
        assert len(received_until_the_end(connection)) == HELLO.size


def received_until_the_end(connection):
    received = b""
    with suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            received += part
    return received


def test_threads_share_few_connections(store):
    """Sixteen ask at once; the server never has more connections than a client may open."""
    store.put(2, pattern(2))
    together = threading.Barrier(16)
    with (
        PeerServer(store, host="127.0.0.1", key=KEY, timeout_s=60) as server,
        WatchedPeers(KEY, NBYTES, address_of=lambda _: server.address, timeout_s=60, n_connections=3) as peers,
        ThreadPoolExecutor(16) as pool,
    ):

        def ask(_):
            together.wait(timeout=60)
            return asked(peers, 2)[0] is not None

        assert all(pool.map(ask, range(16)))
        assert 1 <= len(peers._open) <= 3
        assert len(server._connections) <= 3


def test_server_sends_away_whom_it_has_no_room_for(store):
    store.put(2, pattern(2))
    with (
        PeerServer(store, host="127.0.0.1", key=KEY, timeout_s=60, most_connections=2) as server,
        ExitStack() as stack,
    ):
        three = [
            stack.enter_context(WatchedPeers(KEY, NBYTES, address_of=lambda _: server.address, timeout_s=60))
            for _ in range(3)
        ]
        assert [asked(peers, 2)[0] is not None for peers in three] == [True, True, False]


def raise_and_count():
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 256))
    print(most_connections(), resource.getrlimit(resource.RLIMIT_NOFILE), connections_per_peer(1, n_clients=8), end=" ")
    print([connections_per_peer(16, n_clients=n) for n in (8, 32, 1000)])


def test_connections_are_within_what_a_process_may_have_open():
    """256 open files, a quarter for 8 clients: 8 each, of which 4 do; of 32: 2; and never less than 1."""
    assert run(raise_and_count, 1)[0].output.split("\n")[0] == "64 (256, 256) 1 [4, 2, 1]"


def test_nothing_is_taken_from_a_peer_with_another_data_set(store):
    store.put(2, pattern(3))
    with (
        PeerServer(store, host="127.0.0.1", key=peer_key(b"token of the run", bytes(32))) as server,
        WatchedPeers(KEY, NBYTES, address_of=lambda _: server.address) as peers,
    ):
        assert asked(peers, 2) == [None]
        assert 1 in peers.failures


def test_closing_ends_a_wait_for_a_peer(stranger):
    thread, address = stranger(hello(KEY, "server"))
    peers = WatchedPeers(KEY, NBYTES, address_of=lambda _: address, timeout_s=60)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(asked, peers, 2)
        thread.join()
        while not len(peers._open):
            time.sleep(0.005)
        peers.close()
        assert waiting.result(timeout=30) == [None]


def test_server_outlives_clients_that_talk_nonsense(store, peer):
    server, peers = peer
    host, port = server.address.split(":")
    for words in (
        b"GET / HTTP/1.1\r\n\r\n" * 4,
        hello(KEY, "client") + HEAD.pack(-5, 0.0),
        hello(KEY, "client") + HEAD.pack(3, 0.0),
    ):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(words)
    store.put(2, pattern(2))
    assert asked(peers, 2)[0] is not None


def test_wants_survive_the_wire():
    wants = [Want(5, 1, 10**12), Want(6)]
    assert unpack_wants(pack_wants(wants)) == wants


def test_many_buffers_are_sent_whole_although_the_kernel_takes_parts():
    ours, theirs = socket.socketpair()
    data = [pattern(i, 997) for i in range(1500)]
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        deadline_s = time.monotonic() + TIMEOUT_S
        sending = pool.submit(send_message, ours, [each.data for each in data], deadline_s=deadline_s)
        got = bytearray(997 * 1500)
        receive(theirs, got, deadline_s=deadline_s)
        sending.result()
    assert bytes(got) == b"".join(each.tobytes() for each in data)


def test_address_that_is_not_of_this_machine_is_named(store):
    with pytest.raises(RunError, match=r"serving samples at 203\.0\.113\.1"):
        PeerServer(store, host="203.0.113.1", key=KEY)
