"""How many files and connections a process may have open at once."""

import resource

MOST_CONNECTIONS = 4
"""Of a rank to a node: a few streams fill a network, one would wait for each answer before the next request."""

_ENOUGH = 1 << 16  # some programs that a process starts walk through all numbers below the limit
_SHARE = 4  # of all open files, one in so many may be a connection to a peer; the others are files, and the user's


def raise_limit() -> int:
    """Raise the limit of open files as far as this process may, and return it. Source: getrlimit(2), RLIMIT_NOFILE."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return _limit()


def most_connections() -> int:
    """Return how many connections of others a process may serve."""
    return max(1, _limit() // _SHARE)


def connections_per_peer(readers: int, *, n_clients: int) -> int:
    """Return how many connections a rank may have to each other node.

    Args:
        readers: Requests that it makes at once.
        n_clients: Ranks that one node serves; they share what its process may have open.
    """
    return max(1, min(readers, MOST_CONNECTIONS, most_connections() // max(1, n_clients)))


def _limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _ENOUGH if soft == resource.RLIM_INFINITY else soft
