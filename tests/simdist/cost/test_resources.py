"""Resources are numbered and named."""

import numpy as np
import pytest

from simdist.cost.costs import Resources

RESOURCES = Resources(n_nodes=3, ranks_per_node=2, n_servers=1, n_storage_servers=1)
OF_RANKS = {"fabric_out": 6, "fabric_in": 6, "readers": 6, "decoders": 6}
OF_MACHINES = {"nic_out": 4, "nic_in": 4}
OF_NODES = dict.fromkeys(
    ("bridge_up", "bridge_down", "storage_client", "disk_read", "disk_write", "disk_operations", "memory", "cores"), 3
)


@pytest.mark.parametrize(("name", "n_alike"), {**OF_RANKS, **OF_MACHINES, **OF_NODES}.items())
def test_a_resource_is_named_by_its_function_and_whose_it_is(name, n_alike):
    indices = getattr(RESOURCES, name)(np.arange(n_alike))
    assert [RESOURCES.name(int(index)) for index in indices] == [f"{name}[{number}]" for number in range(n_alike)]


def test_a_resource_that_there_is_once_has_no_number():
    numbers = [RESOURCES.switch, RESOURCES.storage_server(0), RESOURCES.storage_operations(2)]
    assert [RESOURCES.name(number) for number in numbers] == ["switch", "storage_server", "storage_operations"]


def test_storage_servers_take_turns_over_the_nodes():
    two = Resources(n_nodes=5, ranks_per_node=2, n_servers=1, n_storage_servers=2)
    for name in ("storage_server", "storage_operations"):
        found = [two.name(int(number)) for number in getattr(two, name)(np.arange(5))]
        assert found == [f"{name}[{server}]" for server in (0, 1, 0, 1, 0)]
    names = [two.name(index) for index in range(two.n_resources)]
    assert len({*names}) == len(names)
    assert [two.name(int(number)) for number in two.disk_read(np.arange(5))] == [f"disk_read[{n}]" for n in range(5)]


def test_every_resource_has_a_name_of_its_own():
    names = [RESOURCES.name(index) for index in range(RESOURCES.n_resources)]
    assert len(set(names)) == len(names) == sum({**OF_RANKS, **OF_MACHINES, **OF_NODES}.values()) + 3


@pytest.mark.parametrize("index", [-1, RESOURCES.n_resources])
def test_what_is_no_resource_has_no_name(index):
    with pytest.raises(IndexError, match=f"resource {index} of {RESOURCES.n_resources}"):
        RESOURCES.name(index)
