"""The queries: one instance with one replica without a launcher, or the values of poprun."""

import pytest

import popdist

NAMES = (
    "POPDIST_NUM_TOTAL_REPLICAS",
    "POPDIST_NUM_IPUS_PER_REPLICA",
    "POPDIST_NUM_LOCAL_REPLICAS",
    "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE",
    "POPDIST_REPLICA_INDEX_OFFSET",
    "POPDIST_LOCAL_INSTANCE_INDEX",
)
MPI_NAMES = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in (*NAMES, *MPI_NAMES, "POPDIST_DEVICE_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def second_of_four(monkeypatch):
    """Set the variables of instance 2 of 4, the first one on its host, with 3 replicas of 2 devices."""
    for name, value in zip(NAMES, (12, 2, 3, 1, 6, 0), strict=True):
        monkeypatch.setenv(name, str(value))
    for name, value in zip(MPI_NAMES, (4, 2, 0), strict=True):
        monkeypatch.setenv(name, str(value))


WITHOUT_LAUNCHER = {
    popdist.isPopdistEnvSet: False,
    popdist.getNumTotalReplicas: 1,
    popdist.getNumLocalReplicas: 1,
    popdist.getReplicaIndexOffset: 0,
    popdist.getNumIpusPerReplica: 1,
    popdist.getNumInstances: 1,
    popdist.getInstanceIndex: 0,
    popdist.getLocalInstanceIndex: 0,
    popdist.getDeviceId: 0,
}
UNDER_POPRUN = {
    popdist.isPopdistEnvSet: True,
    popdist.getNumTotalReplicas: 12,
    popdist.getNumLocalReplicas: 3,
    popdist.getReplicaIndexOffset: 6,
    popdist.getNumIpusPerReplica: 2,
    popdist.getNumInstances: 4,
    popdist.getInstanceIndex: 2,
    popdist.getLocalInstanceIndex: 0,
}


@pytest.mark.parametrize(("query", "wanted"), WITHOUT_LAUNCHER.items(), ids=lambda q: getattr(q, "__name__", ""))
def test_queries_without_a_launcher_describe_one_instance(query, wanted):
    found = query()
    assert (found, type(found)) == (wanted, type(wanted))


@pytest.mark.parametrize(("query", "wanted"), UNDER_POPRUN.items(), ids=lambda q: getattr(q, "__name__", ""))
def test_queries_under_poprun_return_its_values(second_of_four, query, wanted):
    found = query()
    assert (found, type(found)) == (wanted, type(wanted))


def test_each_rank_of_mpirun_is_an_instance_with_one_replica(monkeypatch):
    for name, value in zip(MPI_NAMES, (3, 1, 1), strict=True):
        monkeypatch.setenv(name, str(value))
    assert not popdist.isPopdistEnvSet()
    assert (popdist.getNumInstances(), popdist.getInstanceIndex(), popdist.getLocalInstanceIndex()) == (3, 1, 1)
    assert (popdist.getNumTotalReplicas(), popdist.getNumLocalReplicas()) == (3, 1)
    assert popdist.getReplicaIndexOffset() == 1


@pytest.mark.parametrize(("number", "wanted"), [(1, True), (2, False)])
def test_the_devices_per_replica_are_checked_without_a_launcher(number, wanted):
    assert popdist.checkNumIpusPerReplica(number) is wanted


@pytest.mark.parametrize(("number", "wanted"), [(1, False), (2, True)])
def test_the_devices_per_replica_are_checked_under_poprun(second_of_four, number, wanted):
    assert popdist.checkNumIpusPerReplica(number) is wanted


class TestDeviceId:
    def test_zero_means_the_launched_number_of_devices(self, second_of_four):
        assert popdist.getDeviceId() == popdist.getDeviceId(0) == popdist.getDeviceId(2)

    def test_the_instances_of_a_host_get_neighbouring_ids(self, monkeypatch, second_of_four):
        ids = []
        for local in range(3):
            monkeypatch.setenv("POPDIST_LOCAL_INSTANCE_INDEX", str(local))
            monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", str(local))
            ids.append(popdist.getDeviceId())
        assert ids == list(range(ids[0], ids[0] + 3))

    def test_the_partition_sets_the_device(self, monkeypatch, second_of_four):
        monkeypatch.setenv("POPDIST_DEVICE_ID", "26")
        assert popdist.getDeviceId() == popdist.getDeviceId(2) == 26

    def test_an_invalid_device_is_refused(self, monkeypatch, second_of_four):
        monkeypatch.setenv("POPDIST_DEVICE_ID", "x")
        with pytest.raises(popdist.EnvironmentMismatchError, match="POPDIST_DEVICE_ID='x' is not a whole number"):
            popdist.getDeviceId()

    def test_another_number_than_the_launched_one_is_refused(self, second_of_four):
        with pytest.raises(ValueError, match="launched with 2; give poprun --ipus-per-replica 4"):
            popdist.getDeviceId(4)


def test_incomplete_variables_give_one_clear_error(monkeypatch):
    monkeypatch.setenv("POPDIST_NUM_TOTAL_REPLICAS", "4")
    with pytest.raises(popdist.EnvironmentMismatchError, match="POPDIST_NUM_LOCAL_REPLICAS"):
        popdist.getNumLocalReplicas()


def test_contradictory_variables_give_one_clear_error(monkeypatch, second_of_four):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    with pytest.raises(popdist.EnvironmentMismatchError, match="contradict each other.*OMPI_COMM_WORLD_RANK=3"):
        popdist.getInstanceIndex()


def test_instance_returns_all_values_at_once(second_of_four):
    instance = popdist.instance()
    assert (instance.index, instance.count, instance.local_replica_range) == (2, 4, range(6, 9))
    assert instance.launcher == "poprun"
