"""TF_CONFIG: the described instance, and errors that quote invalid content."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

import popdist
from popdist.cluster_resolver import ClusterSpec
from popdist.environments.detection import detect_instance
from popdist.environments.tf_config import EXAMPLE, Cluster, read_cluster
from popdist.errors import EnvironmentMismatchError

TWO = ["localhost:3737", "localhost:3738"]


def config(workers=TWO, task_type="worker", index=0, chief=None, **others):
    cluster = ({} if chief is None else {"chief": chief}) | ({} if workers is None else {"worker": workers})
    return {"cluster": cluster, "task": {"type": task_type, "index": index}, **others}


def environ(*args, **kwargs):
    return {"TF_CONFIG": json.dumps(config(*args, **kwargs))}


def without(key, inside=None):
    value = config()
    del (value[inside] if inside else value)[key]
    return value


def refused(variables):
    """Return the single message that refuses TF_CONFIG."""
    with pytest.raises(EnvironmentMismatchError) as caught:
        detect_instance(variables)
    message = str(caught.value)
    assert re.fullmatch(r"[^;\n]+; [^\n]+", message), "fact, fact; way out"
    return message


class TestInstance:
    def test_each_worker_is_an_instance_with_one_replica(self):
        for index in range(2):
            instance = detect_instance(environ(index=index))
            assert (instance.index, instance.count, instance.launcher) == (index, 2, "tf_config")
            assert instance.local_replica_range == range(index, index + 1)
            assert (instance.total_replicas, instance.ipus_per_replica) == (2, 1)

    def test_the_chief_comes_first_and_the_workers_follow(self):
        three = {"workers": ["b:1", "c:1"], "chief": ["a:1"]}
        ranks = [
            detect_instance(environ(**three, task_type=task_type, index=index)).index
            for task_type, index in [("chief", 0), ("worker", 0), ("worker", 1)]
        ]
        assert ranks == [0, 1, 2]
        assert read_cluster(environ(**three)).addresses == ("a:1", "b:1", "c:1")

    def test_a_chief_may_be_alone(self):
        instance = detect_instance(environ(None, "chief", chief=["a:1"]))
        assert (instance.index, instance.count) == (0, 1)

    def test_the_program_may_ask_for_more_replicas(self):
        assert detect_instance(environ(index=1), num_replicas=6).local_replica_range == range(3, 6)

    def test_the_variable_may_set_the_number_of_replicas(self):
        variables = {"TF_CONFIG": json.dumps(config(index=1) | {"num_replicas": 6})}
        assert detect_instance(variables).local_replica_range == range(3, 6)
        assert detect_instance(variables, num_replicas=6) == detect_instance(variables)
        with pytest.raises(
            EnvironmentMismatchError, match=r"asks for num_replicas=4, .* is 6; give both the same number"
        ):
            detect_instance(variables, num_replicas=4)

    @pytest.mark.parametrize("said", ["6", 0, True, 2.5])
    def test_the_number_of_replicas_must_be_a_whole_number(self, said):
        variables = {"TF_CONFIG": json.dumps(config() | {"num_replicas": said})}
        assert '"num_replicas" in TF_CONFIG is' in refused(variables)

    @pytest.mark.parametrize(("replicas", "ways_out"), [(5, "use 3 or 6$"), (2, "use 3$"), (0, "use 3$")])
    def test_replicas_are_divided_evenly(self, replicas, ways_out):
        with pytest.raises(EnvironmentMismatchError, match=f'is {replicas}, .* is 3 .*"a:1".*{ways_out}'):
            detect_instance(environ(["a:1", "b:1", "c:1"]), num_replicas=replicas)

    @pytest.mark.parametrize(
        ("workers", "local_indices"),
        [
            (["a:1", "b:1", "a:2", "A:3", "a.:4"], [0, 0, 1, 2, 3]),
            (["localhost:1", "127.0.0.1:1", "127.0.0.2:1", "[::1]:1", "unix:/a", "unix:///b"], [0, 1, 2, 3, 4, 5]),
            (["[2001:db8::1]:1", "[2001:0db8::0001]:2", "[2001:db8::2]:1"], [0, 1, 0]),
            (["192.0.2.1:1", "192.0.2.2:1", "192.0.2.1:2"], [0, 0, 1]),
        ],
    )
    def test_the_local_index_counts_earlier_tasks_of_the_same_host(self, workers, local_indices):
        instances = [detect_instance(environ(workers, index=index)) for index in range(len(workers))]
        assert [instance.local_index for instance in instances] == local_indices

    def test_an_index_may_be_a_text_of_digits(self):
        assert detect_instance(environ(index="1")).index == 1

    def test_other_keys_are_ignored(self):
        assert detect_instance(environ(environment="cloud", job={"region": "x"}, rpc_layer="grpc")).count == 2

    @pytest.mark.parametrize("variables", [{}, {"TF_CONFIG": ""}])
    def test_an_empty_variable_is_ignored(self, variables):
        assert detect_instance(variables).launcher == "single"

    def test_mpirun_and_poprun_win_over_tf_config(self):
        mpi = {
            "OMPI_COMM_WORLD_RANK": "2",
            "OMPI_COMM_WORLD_SIZE": "3",
            "OMPI_COMM_WORLD_LOCAL_RANK": "2",
        }
        replicas = {
            "POPDIST_NUM_TOTAL_REPLICAS": "3",
            "POPDIST_NUM_LOCAL_REPLICAS": "1",
            "POPDIST_NUM_IPUS_PER_REPLICA": "1",
            "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": "1",
            "POPDIST_REPLICA_INDEX_OFFSET": "2",
            "POPDIST_LOCAL_INSTANCE_INDEX": "2",
        }
        for faulty_or_not in (environ(), {"TF_CONFIG": "faulty"}):
            assert detect_instance(faulty_or_not | mpi).launcher == "mpirun"
            assert detect_instance(faulty_or_not | mpi | replicas).launcher == "poprun"


class TestAddresses:
    @pytest.mark.parametrize(
        "address",
        [
            "localhost:1",
            "localhost:65535",
            "node-1.example.com:3737",
            "node-1.example.com.:3737",
            "my_service:3737",
            "n1:3737",
            "192.0.2.7:3737",
            "[::1]:3737",
            "[2001:db8::7]:3737",
            "[fe80::1%eth0]:3737",
            "unix:/tmp/a",
            "unix:///tmp/a b",
        ],
    )
    def test_valid_addresses_are_kept_unchanged(self, address):
        assert read_cluster(environ([address])).addresses == (address,)

    @pytest.mark.parametrize("port", ["0", "65536", "99999999999999999999", "-1", "1.5", "http", "", " 1", "+1", "٣"])
    def test_a_port_is_a_whole_number_of_1_to_65535(self, port):
        message = refused(environ([f"localhost:{port}"]))
        assert f"the address {json.dumps(f'localhost:{port}')} in TF_CONFIG has the port {json.dumps(port)}" in message
        assert "1..65535" in message

    @pytest.mark.parametrize(
        ("address", "words"),
        [
            ("localhost", "has no port; write localhost:3737"),
            ("", "has no port"),
            ("[::1]", r"has no port; write \[::1\]:3737"),
            (":3737", "has no host; write localhost:3737"),
            ("::1:3737", r"is IPv6 without brackets; write \[::1\]:3737"),
            ("2001:db8::7", "is IPv6 without brackets"),
            ("2001:db8:0:0:0:0:0:7:3737", "is IPv6 without brackets"),
            ("a:b:3737", "has several colons"),
            ("grpc://localhost:3737", "begins with a scheme; leave it out"),
            ("dns:///localhost:3737", "begins with a scheme"),
            ("[localhost]:3737", "neither a name nor an IP address"),
            ("[127.0.0.1]:3737", "neither a name nor an IP address"),
            ("[[::1]]:3737", "neither a name nor an IP address"),
            ("[]:3737", "neither a name nor an IP address"),
            ("[::1:3737", "neither a name nor an IP address"),
            ("[::1]x:3737", "neither a name nor an IP address"),
            ("256.0.0.1:3737", "neither a name nor an IP address"),
            ("127.0.1:3737", "neither a name nor an IP address"),
            ("local host:3737", "neither a name nor an IP address"),
            (" localhost:3737", "neither a name nor an IP address"),
            ("a/b:3737", "neither a name nor an IP address"),
            ("a..b:3737", "neither a name nor an IP address"),
            ("größe:3737", "neither a name nor an IP address"),
            ("localhost\n:3737", "cannot be printed"),
            ("unix:/tmp/\0", "cannot be printed"),
            ("unix:/tmp/\ud800", "cannot be printed"),
            ("0.0.0.0:3737", "every interface, not for one machine; name the machine"),
            ("[::]:3737", "every interface"),
            ("unix:relative", "not an absolute path of a file; write unix:/path"),
            ("unix:", "not an absolute path of a file"),
            ("unix:/", "not an absolute path of a file"),
            ("unix:/tmp/", "not an absolute path of a file"),
            ("unix:///", "not an absolute path of a file"),
            ("unix://host/tmp", "not an absolute path of a file"),
            ("unix:/" + 107 * "a", "has a path of 108 bytes; a socket path has at most 107"),
        ],
    )
    def test_an_invalid_address_is_quoted(self, address, words):
        message = refused(environ(["localhost:1", address]))
        assert re.search(words, message)
        assert json.dumps(address)[:100] in message

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ("localhost:3737", "localhost:3737"),
            ("Node:3737", "node:3737"),
            ("node.:3737", "node:3737"),
            ("[::1]:3737", "[0:0::1]:3737"),
            ("unix:/tmp/a", "unix:///tmp/a"),
            ("unix:/tmp/a", "unix:/tmp/./a"),
        ],
    )
    def test_a_repeated_address_is_refused(self, first, second):
        among_workers = refused(environ([first, "other:1", second]))
        with_the_chief = refused(environ(["other:1", second], chief=[first]))
        assert among_workers == with_the_chief
        assert f"{json.dumps(second)} twice" in among_workers
        assert first == second or f"once as {json.dumps(first)}; give each" in among_workers

    def test_a_port_may_occur_on_several_hosts(self):
        assert detect_instance(environ(["a:1", "b:1", "[::1]:1", "unix:/a"])).count == 4


class TestFaultyTFConfig:
    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("{'cluster': {}}", r"double quotes at character 2 near \"{'cluster': {}}\""),
            ('{"cluster":{"worker":["localhost:3737" "localhost:3738"]}}', "',' delimiter at character 40 near "),
            ("{cluster:{worker:[localhost:3737]}}", "at character 2 near"),
            ('{"cluster":', "at its end near '"),
            (" ", "at its end near ' '"),
            ("{} {}", "Extra data at character 4 near"),
            ("[" * 100_000, r"cannot be read.*'\[\[\["),
            ("1" * 5000, "cannot be read.*'1111"),
        ],
    )
    def test_invalid_json_is_quoted_around_the_fault(self, text, words):
        message = refused({"TF_CONFIG": text})
        assert re.search(words, message)
        assert EXAMPLE in message
        assert len(message) < 500

    @pytest.mark.parametrize("text", ["[]", "null", "1", '"localhost:3737"'])
    def test_the_value_must_be_an_object(self, text):
        assert f"TF_CONFIG is {text}, not an object" in refused({"TF_CONFIG": text})

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ({}, 'TF_CONFIG has no "cluster", only {}; add "cluster":{"worker":'),
            (without("cluster"), 'no "cluster", only {"task": {"type": "worker", "index": 0}}'),
            (without("task"), '; add "task":{"type":"worker","index":0}'),
            (
                without("type", inside="task"),
                '"task" in TF_CONFIG has no "type", only {"index": 0}; add "type":"worker"',
            ),
            (
                without("index", inside="task"),
                '"task" in TF_CONFIG has no "index", only {"type": "worker"}; add "index":0',
            ),
            ({"cluster": TWO}, f'"cluster" in TF_CONFIG is {json.dumps(TWO)}, not an object'),
            ({"cluster": {}}, "is {}, without a task"),
            (config() | {"task": "worker"}, '"task" in TF_CONFIG is "worker", not an object'),
            (config() | {"task": None}, '"task" in TF_CONFIG is null, not an object'),
            (config([]), 'the job "worker" in TF_CONFIG is [], not a list of at least one address; write "worker":['),
            (config(chief=[]), 'the job "chief" in TF_CONFIG is []'),
            (config("localhost:3737"), 'is "localhost:3737", not a list'),
            (config({"0": "localhost:3737"}), 'is {"0": "localhost:3737"}, not a list'),
            (config(["localhost:3737", 3738]), "lists 3738, not a string"),
            (config(task_type=1), "the task type in TF_CONFIG is 1, not a string"),
            (config(task_type=None), "the task type in TF_CONFIG is null"),
            (config(rpc_layer="http"), 'the rpc_layer is "http", but workers speak only gRPC'),
            (config(rpc_layer=["grpc"]), 'the rpc_layer is ["grpc"]'),
        ],
    )
    def test_missing_keys_and_wrong_types_are_quoted(self, content, words):
        assert words in refused({"TF_CONFIG": json.dumps(content)})

    @pytest.mark.parametrize("index", [1.5, 1.0, True, None, [0], {}, "", "one", "-1", "1.0", " 1", "1_0", "٣"])
    def test_the_index_is_a_whole_number(self, index):
        assert f"the task index is {json.dumps(index)}, not a whole number; write 0" in refused(environ(index=index))

    @pytest.mark.parametrize("index", [-1, 2, 10**30, "2"])
    def test_the_index_must_be_in_the_range_of_its_job(self, index):
        message = refused(environ(index=index))
        assert f"the task index is {index}, but the cluster lists 2 of type worker: {json.dumps(TWO)}" in message
        assert message.endswith("use one of 0..1")

    def test_the_chief_has_the_index_0(self):
        assert refused(environ(task_type="chief", index=1, chief=["a:1"])).endswith("use 0")

    def test_two_chiefs_are_refused(self):
        assert 'lists 2 chiefs, ["a:1", "b:1"]; keep one' in refused(environ(chief=["a:1", "b:1"]))

    def test_the_task_must_be_part_of_the_cluster(self):
        assert 'the task type is "chief", but the cluster has only the job worker; add' in refused(
            environ(task_type="chief")
        )

    @pytest.mark.parametrize(
        ("job", "words"),
        [
            ("evaluator", "evaluators are not supported; evaluate on a worker"),
            ("ps", "parameter servers are not supported; leave them out"),
            ("master", 'the old name of the chief; write "chief"'),
            ("workers", "unknown; use worker or chief"),
            ("", "unknown; use worker or chief"),
            ("Worker", "unknown; use worker or chief"),
        ],
    )
    def test_other_jobs_are_refused_with_the_way_out(self, job, words):
        listed = config()
        listed["cluster"][job] = ["localhost:4000"]
        in_cluster = refused({"TF_CONFIG": json.dumps(listed)})
        assert f'the "cluster" in TF_CONFIG has the job "{job}"' in in_cluster
        as_task = refused(environ(task_type=job))
        assert f'the task type is "{job}"' in as_task
        assert words in in_cluster
        assert words in as_task

    def test_a_repeated_key_is_refused(self):
        text = '{"cluster":{"worker":["a:1"],"worker":["b:1"]},"task":{"type":"worker","index":0}}'
        assert 'the key "worker" twice in one object' in refused({"TF_CONFIG": text})

    def test_long_values_are_shortened_in_messages(self):
        assert len(refused(environ([f"node{index}:1" for index in range(1000)], index=1000))) < 300


class TestClusterResolver:
    @pytest.fixture
    def resolver(self):
        return popdist.TFConfigClusterResolver(environ=environ(chief=["a:1"], workers=["b:1", "c:1"], index=1))

    def test_the_resolver_returns_the_task(self, resolver):
        assert (resolver.task_type, resolver.task_id) == ("worker", 1)
        assert (resolver.rpc_layer, resolver.environment) == (None, "")

    def test_the_resolver_reads_the_variables_of_the_process(self, monkeypatch):
        monkeypatch.setenv("TF_CONFIG", environ(index=1)["TF_CONFIG"])
        assert popdist.TFConfigClusterResolver().task_id == 1

    def test_the_cluster_is_one_value_in_the_order_of_the_ranks(self, resolver):
        assert resolver.cluster == Cluster(chief=("a:1",), worker=("b:1", "c:1"), task_type="worker", task_id=1)
        assert (resolver.cluster.addresses, resolver.cluster.rank) == (("a:1", "b:1", "c:1"), 2)
        assert resolver.cluster.jobs == {"chief": ("a:1",), "worker": ("b:1", "c:1")}
        assert hash(resolver.cluster)

    def test_the_cluster_spec_has_the_interface_of_tensorflow(self, resolver):
        spec = resolver.cluster_spec()
        assert spec.as_dict() == {"chief": ["a:1"], "worker": ["b:1", "c:1"]}
        assert spec.jobs == ["chief", "worker"]
        assert (spec.num_tasks("worker"), spec.task_indices("worker")) == (2, [0, 1])
        assert (spec.task_address("worker", 1), spec.job_tasks("worker")) == ("c:1", ["b:1", "c:1"])
        assert spec == ClusterSpec(chief=("a:1",), worker=("b:1", "c:1"))
        assert spec != popdist.TFConfigClusterResolver(environ=environ()).cluster_spec()

    def test_a_job_without_tasks_does_not_exist(self):
        spec = popdist.TFConfigClusterResolver(environ=environ()).cluster_spec()
        assert spec.as_dict() == {"worker": TWO}
        with pytest.raises(ValueError, match="no job 'chief'; use one of worker"):
            spec.num_tasks("chief")

    @pytest.mark.parametrize("index", [2, -1, "0"])
    def test_a_missing_task_has_no_address(self, resolver, index):
        with pytest.raises(ValueError, match=f"no task {index!r}; use one of 0 to 1"):
            resolver.cluster_spec().task_address("worker", index)

    def test_master_is_the_address_of_a_task(self, resolver):
        assert resolver.master() == "c:1"
        assert resolver.master("chief", 0) == "a:1"
        assert resolver.master(task_id=0, rpc_layer="grpc") == "grpc://b:1"
        with pytest.raises(ValueError, match="no job 'ps'; use one of chief, worker"):
            resolver.master("ps", 0)

    def test_master_is_empty_for_a_single_task(self):
        assert popdist.TFConfigClusterResolver(environ=environ(["a:1"])).master() == ""

    @pytest.mark.parametrize("asked_by", ["argument", "TF_CONFIG"])
    def test_the_rpc_layer_is_the_prefix_of_the_address(self, asked_by):
        if asked_by == "argument":
            resolver = popdist.TFConfigClusterResolver(rpc_layer="grpc", environ=environ())
        else:
            resolver = popdist.TFConfigClusterResolver(environ=environ(rpc_layer="grpc"))
        assert (resolver.rpc_layer, resolver.master()) == ("grpc", "grpc://localhost:3737")

    @pytest.mark.parametrize("name", ["cluster", "task_type", "task_id", "rpc_layer", "environment"])
    def test_no_attribute_can_be_set(self, resolver, name):
        with pytest.raises(AttributeError, match=name):
            setattr(resolver, name, getattr(resolver, name))

    def test_each_task_has_one_simulated_ipu(self, resolver):
        assert resolver.num_accelerators() == resolver.num_accelerators("chief", 0) == {"IPU": 1}
        with pytest.raises(ValueError, match="no task 5"):
            resolver.num_accelerators("worker", 5)

    def test_arguments_override_the_task(self):
        variables = environ(chief=["a:1"], index=99)
        assert popdist.TFConfigClusterResolver(task_id=1, environ=variables).cluster.rank == 2
        assert popdist.TFConfigClusterResolver("chief", 0, environ=variables).cluster.rank == 0
        without_task = {"TF_CONFIG": json.dumps(without("task"))}
        assert popdist.TFConfigClusterResolver("worker", 1, environ=without_task).cluster.rank == 1

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ({"task_type": "ps"}, 'the task type is "ps", parameter servers are not supported'),
            ({"task_id": 2}, "the task index is 2, but the cluster lists 2"),
            ({"task_id": object()}, "not a whole number"),
            ({"rpc_layer": "grpc+verbs"}, 'the rpc_layer is "grpc+verbs"'),
        ],
    )
    def test_arguments_are_checked_like_the_variable(self, arguments, words):
        with pytest.raises(EnvironmentMismatchError, match=re.escape(words)):
            popdist.TFConfigClusterResolver(**arguments, environ=environ())

    @pytest.mark.parametrize("variables", [{}, {"TF_CONFIG": ""}])
    def test_a_missing_variable_is_refused_with_an_example(self, variables):
        with pytest.raises(EnvironmentMismatchError, match="TF_CONFIG is not set.*; set it.*LocalStrategy") as caught:
            popdist.TFConfigClusterResolver(environ=variables)
        assert EXAMPLE in str(caught.value)

    def test_the_example_in_the_message_works(self):
        shown = EXAMPLE.removeprefix("TF_CONFIG='").removesuffix("'")
        assert detect_instance({"TF_CONFIG": shown}).count == 2


def test_queries_work_before_init():
    program = (
        "import popdist; print(popdist.getInstanceIndex(), popdist.getNumInstances(), popdist.instance().launcher)"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(sys.path)} | environ(index=1),
        capture_output=True,
        text=True,
        check=True,
    )
    assert finished.stdout == "1 2 tf_config\n"
