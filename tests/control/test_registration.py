from typing import Any

import pytest

from rlix.control.registration import build_registration, check_gang_request, check_rollout_cluster
from rlix.protocol.errors import SpecError
from rlix.protocol.messages import Device, DeviceKind, Registration
from rlix.protocol.types import Phase

# Two nodes with four devices each.
DEVICES = tuple(Device(i, f"node{i // 4}", f"10.0.0.{i // 4}", i % 4, DeviceKind.CPU) for i in range(8))


def build(sizes: Any, mappings: Any, namespace: Any = "ns") -> Registration:
    return build_registration("ft_1", namespace, sizes, mappings, DEVICES)


def test_a_good_declaration_becomes_a_registration() -> None:
    got = build({"actor_train": 8, "actor_infer": 2}, {"actor_train": list(range(8)), "actor_infer": (2, 3, 6, 7)})
    assert [c.name for c in got.clusters] == ["actor_train", "actor_infer"]
    assert got.cluster("actor_infer").bundles == ((2, 3), (6, 7))
    assert got.ray_namespace == "ns"


@pytest.mark.parametrize(
    ("sizes", "mappings", "message"),
    [
        ({}, {"actor_train": [0]}, "cluster_tp_configs is empty"),
        ({"actor_train": 1}, {}, "cluster_device_mappings is empty"),
        (3, {"actor_train": [0]}, "cluster_tp_configs must be a dict keyed by cluster name, got int"),
        ({"actor_train": 1}, [0], "cluster_device_mappings must be a dict keyed by cluster name, got list"),
        ({7: 1}, {7: [0]}, "7 cannot be a cluster's name; use a word of at most 64 letters, digits, '_' and '-'"),
        ({"a b": 1}, {"a b": [0]}, "'a b' cannot be a cluster's name"),
        ({"1st": 1}, {"1st": [0]}, "'1st' cannot be a cluster's name; .* does not begin with a digit"),
        ({"": 1}, {"": [0]}, "'' cannot be a cluster's name"),
        ({"x" * 65: 1}, {"x" * 65: [0]}, "cannot be a cluster's name"),
        ({f"c{i}": 1 for i in range(65)}, {"c0": 1}, "a job has at most 64 clusters, and cluster_tp_configs names 65"),
        ({"c0": 1}, {f"c{i}": 1 for i in range(65)}, "64 clusters, and cluster_device_mappings names 65"),
        ({"actor_train": 1, "critic": 1}, {"actor_train": [0]}, "'critic' is in cluster_tp_configs but not in"),
        ({"actor_train": 1}, {"actor_train": [0], "critic": [1]}, "'critic' is in cluster_device_mappings but not in"),
        ({"actor_train": 0}, {"actor_train": [0]}, "'actor_train': .*at least 1, got 0"),
        ({"actor_train": True}, {"actor_train": [0]}, "must be an int, got True"),
        ({"actor_train": "2"}, {"actor_train": [0, 1]}, "must be an int, got '2'"),
        ({"actor_train": 2}, {"actor_train": [0, 1, 2]}, "size 2 does not divide its 3 devices"),
        ({"actor_train": 1}, {"actor_train": [0, 0]}, "device 0 is named more than once"),
        ({"actor_train": 1}, {"actor_train": [8]}, "device 8 does not exist; this pool has devices 0-7"),
        ({"actor_train": 1}, {"actor_train": [-1]}, "device -1 does not exist"),
        ({"actor_train": 1}, {"actor_train": []}, "'actor_train': devices: is empty"),
        ({"actor_train": 1}, {"actor_train": [99999999]}, "device 99999999 does not exist; this pool has devices 0-7"),
        ({"actor_train": 1}, {"actor_train": [True]}, r"must be a list of device ids \(ints\), got \[True\]"),
        ({"actor_train": 1}, {"actor_train": "01"}, "must be a list of device ids .*, a number of devices, or a range"),
        ({"actor_train": 1}, {"actor_train": [0.0]}, "must be a list of device ids"),
        (
            {"actor_train": 1},
            {"actor_train": 99999999},
            "asks for 99999999 devices, and this pool has 8; ask for fewer",
        ),
        ({"actor_train": 1}, {"actor_train": 9}, "asks for 9 devices"),
        ({"actor_train": 1}, {"actor_train": 0}, "'actor_train': .* needs at least 1 device, got 0"),
        ({"actor_train": 1}, {"actor_train": -2}, "at least 1 device, got -2"),
        ({"actor_train": 1}, {"actor_train": True}, "a number of devices, or a range .*, got True"),
        ({"actor_train": 1}, {"actor_train": 2.0}, "got 2.0"),
        ({"actor_train": 1}, {"actor_train": None}, "'actor_train': devices: must be given"),
        ({"actor_train": 4}, {"actor_train": 6}, "6 is not a multiple of the tensor-parallel size 4"),
        ({"actor_train": 1}, {"actor_train": {"min": 4}}, r"a range has a min and a max, such as {'min': 4, 'max': 8}"),
        ({"actor_train": 1}, {"actor_train": {"min": 4, "max": 8, "step": 2}}, "a range has a min and a max"),
        ({"actor_train": 1}, {"actor_train": {"min": 6, "max": 4}}, "min 6 is more than max 4; exchange them"),
        ({"actor_train": 1}, {"actor_train": {"min": 9, "max": 12}}, "min: asks for 9 devices, and this pool has 8"),
        ({"actor_train": 1}, {"actor_train": {"min": 4, "max": 10**7}}, "max: must be at most 1000000, got 10000000"),
        ({"actor_train": 1}, {"actor_train": {"min": True, "max": 9}}, "min: must be .* got True"),
        ({"actor_train": 4}, {"actor_train": {"min": 5, "max": 7}}, "no multiple of the .* size 4 lies from 5 to 7"),
        ({"actor_infer": 1}, {"actor_infer": {"min": 4, "max": 8}}, "'actor_infer': .* grows and shrinks by itself"),
        ({"actor_train": 3}, {"actor_train": {"min": 8, "max": 8}}, "8 is not a multiple"),
        ({"actor_infer": 8}, {"actor_infer": [0, 1]}, "size 8 does not divide its 2 devices"),
        ({"actor_infer": 2}, {"actor_infer": [0, 1, 3, 4]}, r"bundle 1 \(devices \[3, 4\]\) is spread over 2 nodes"),
    ],
)
def test_a_mistake_is_named_with_its_place(sizes: Any, mappings: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message) as error:
        build(sizes, mappings)
    assert "register_pipeline('ft_1')" in str(error.value)


def test_who_gave_a_name_is_told_of_the_job_and_not_of_the_call() -> None:
    with pytest.raises(SpecError) as error:
        build_registration("job_1", "ns", {"mine": 1}, {"mine": 9}, DEVICES, called="my script")
    message = "job 'my script': cluster 'mine': devices: asks for 9 devices, and this pool has 8; ask for fewer"
    assert str(error.value) == message
    registration = build_registration("job_1", "ns", {"mine": 1}, {"mine": 2}, DEVICES, called="my script")
    with pytest.raises(SpecError, match=r"^job 'my script' has no cluster 'yours'; it has: mine$"):
        check_gang_request(registration, "yours", Phase.ACTOR_TRAINING)


def test_what_is_wrong_is_not_repeated_at_any_length() -> None:
    long = "x" * 100_000
    for sizes, mappings in (({long: 1}, {long: 1}), ({"a": 1}, {"a": long}), ({"a": long}, {"a": 1})):
        with pytest.raises(SpecError) as error:
            build(sizes, mappings)
        assert len(str(error.value)) < 400
    with pytest.raises(SpecError) as error:
        build_registration("job_1", "ns", {"a": 9}, {"a": 1}, DEVICES, called=long)
    assert len(str(error.value)) < 400


def test_a_job_may_have_64_clusters() -> None:
    names = [f"c{i}" for i in range(64)]
    got = build(dict.fromkeys(names, 1), dict.fromkeys(names, 1))
    assert {c.devices for c in got.clusters} == {(0,)}


def test_a_bundle_larger_than_every_node_may_span_nodes() -> None:
    assert build({"actor_infer": 8}, {"actor_infer": list(range(8))}).cluster("actor_infer").bundles == (
        tuple(range(8)),
    )


def test_the_namespace_must_be_a_name() -> None:
    with pytest.raises(SpecError, match="ray_namespace must be a non-empty string, got None"):
        build({"critic": 1}, {"critic": [0]}, namespace=None)


@pytest.mark.parametrize(
    ("cluster", "phase", "message"),
    [
        ("actor_infer", Phase.INITIALIZATION, r"'actor_infer' is elastic: .* ask for them with rollout\(\)"),
        ("actor_train", Phase.ROLLOUT, r"rollouts are elastic .* use rollout\(\) and 'actor_infer'"),
        ("actor_train", 9, "unknown phase 9; phases are: INITIALIZATION=0"),
        ("actor_train", "actor_training", "unknown phase 'actor_training'"),
        ("actor_train", True, "unknown phase True"),
        ("critic", Phase.CRITIC_TRAINING, "job 'ft_1' has no cluster 'critic'; it has: actor_train"),
    ],
)
def test_gang_requests_that_make_no_sense(cluster: str, phase: Any, message: str) -> None:
    registration = build({"actor_train": 1, "actor_infer": 1}, {"actor_train": [0], "actor_infer": [0]})
    with pytest.raises(SpecError, match=message):
        check_gang_request(registration, cluster, phase)
    assert check_gang_request(registration, "actor_train", 1).devices == (0,)


@pytest.mark.parametrize("devices", [(0, 1, 2, 3), (3,), (1, 1)])
def test_devices_that_a_gang_does_not_have_are_refused(devices: tuple[int, ...]) -> None:
    registration = build({"flow": 1}, {"flow": [0, 1]})
    with pytest.raises(SpecError, match=r"gang 'flow' has devices 0-1, and device.* were asked for: ask for some"):
        check_gang_request(registration, "flow", Phase.ACTOR_TRAINING, devices)
    assert check_gang_request(registration, "flow", Phase.ACTOR_TRAINING, (1,)).name == "flow"


def test_any_number_of_clusters_may_be_elastic() -> None:
    arguments = ({"policy": 1, "draft": 2, "judge": 1}, {"policy": [0], "draft": [0, 1], "judge": [2]})
    got = build_registration("ft_1", "ns", *arguments, DEVICES, elastic_clusters=["draft", "judge"])
    assert [cluster.elastic for cluster in got.clusters] == [False, True, True]
    assert check_rollout_cluster(got, "judge").devices == (2,)
    assert check_gang_request(got, "policy", Phase.ACTOR_TRAINING).devices == (0,)
    with pytest.raises(SpecError, match=r"'policy' is a gang: .* for 'draft' or 'judge'"):
        check_rollout_cluster(got, "policy")
    with pytest.raises(SpecError, match="'draft' is elastic"):
        check_gang_request(got, "draft", Phase.ACTOR_TRAINING)
    none = build_registration("ft_1", "ns", {"actor_infer": 1}, {"actor_infer": [0]}, DEVICES, elastic_clusters=[])
    assert check_gang_request(none, "actor_infer", Phase.REFERENCE_LOG_PROBS).devices == (0,)
    with pytest.raises(SpecError, match="of which it has none"):
        check_rollout_cluster(none, "actor_infer")


@pytest.mark.parametrize(
    ("elastic", "message"),
    [
        ("actor_train", "elastic_clusters must be a list of cluster names, got 'actor_train'"),
        ([1], "elastic_clusters must be a list of cluster names"),
        (["trainer"], "cluster 'trainer' is not in cluster_device_mappings: actor_train"),
        (["actor_train", "actor_train"], "'actor_train' is named more than once"),
    ],
)
def test_a_mistake_in_elastic_clusters_is_named(elastic: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        build_registration("ft_1", "ns", {"actor_train": 1}, {"actor_train": [0]}, DEVICES, elastic_clusters=elastic)


def test_only_the_rollout_cluster_reports_demand() -> None:
    registration = build({"actor_train": 1, "actor_infer": 1}, {"actor_train": [0], "actor_infer": [0]})
    assert check_rollout_cluster(registration, "actor_infer").name == "actor_infer"
    with pytest.raises(SpecError, match=r"'actor_train' is a gang: .* for 'actor_infer'"):
        check_rollout_cluster(registration, "actor_train")


def test_alternatives_are_taken_as_declared() -> None:
    registration = build_registration(
        "ft_1", "ns", {"actor_train": 1}, {"actor_train": [0, 1]}, DEVICES, {"actor_train": [[2, 3], [5, 4], [6]]}
    )
    cluster = registration.cluster("actor_train")
    assert cluster.alternatives == ((2, 3), (5, 4), (6,))
    assert cluster.choices == ((0, 1), (2, 3), (5, 4), (6,))


def test_alternatives_consist_of_whole_bundles() -> None:
    with pytest.raises(SpecError, match=r"alternatives\[0\]: 3 devices are no multiple of the tensor-parallel size 2"):
        build_registration("ft_1", "ns", {"critic": 2}, {"critic": [0, 1]}, DEVICES, {"critic": [[2, 3, 4]]})


def test_sizes_are_placed_away_from_others_and_told_where_else_they_can_run() -> None:
    other = build({"critic": 1}, {"critic": [0, 1]})
    arguments = (
        {"actor_train": 1, "critic": 1, "actor_infer": 1},
        {"actor_train": 2, "critic": 1, "actor_infer": None},
    )
    got = build_registration("ft_2", "ns", *arguments, DEVICES, others=[other])
    assert got.cluster("actor_train").choices == ((2, 3), (4, 5), (6, 7), (0, 1))
    assert got.cluster("critic").devices == (2,)
    assert got.cluster("actor_infer").devices == tuple(range(8))
    fixed = build_registration("ft_2", "ns", *arguments, DEVICES, {"actor_train": []}, others=[other])
    assert fixed.cluster("actor_train").choices == ((2, 3),)
    assert fixed.cluster("critic") == got.cluster("critic")


def test_a_range_may_run_narrower() -> None:
    cluster = build({"train": 2}, {"train": {"min": 2, "max": 4}}).cluster("train")
    assert build({"train": 2}, {"train": "2-4"}).cluster("train") == cluster
    assert cluster.choices == ((0, 1, 2, 3), (4, 5, 6, 7), (0, 1), (2, 3), (4, 5), (6, 7))


def test_of_a_range_that_is_larger_than_the_pool_the_pool_is_the_most() -> None:
    cluster = build({"train": 2}, {"train": {"min": 6, "max": 12}}).cluster("train")
    assert [len(choice) for choice in cluster.choices] == [8, 6]


def test_a_cluster_asked_for_by_size_takes_no_listed_alternatives() -> None:
    with pytest.raises(SpecError, match="'train': cluster_device_alternatives: the cluster asks for a size"):
        build_registration("ft_1", "ns", {"train": 1}, {"train": 2}, DEVICES, {"train": [[2, 3]]})


def test_what_does_not_fit_in_whole_bundles() -> None:
    with pytest.raises(
        SpecError, match=r"^register_pipeline\('ft_1'\): cluster 'infer': 3 devices in bundles of 3 .*for 0"
    ):
        build_registration("ft_1", "ns", {"infer": 3}, {"infer": None}, DEVICES[:2], elastic_clusters=["infer"])


def test_every_wrong_cluster_gets_a_line() -> None:
    with pytest.raises(SpecError) as error:
        build({"a": 1, "b": 1, "c": 1}, {"a": [99999999], "b": 2, "c": []})
    first, second = str(error.value).splitlines()
    assert "'a': devices: device 99999999 does not exist" in first
    assert "'c': devices: is empty" in second


def test_the_pool_in_a_message_has_gaps() -> None:
    with pytest.raises(SpecError, match="device 1 does not exist; this pool has devices 0, 2-3, 6-7"):
        build_registration("ft_1", "ns", {"a": 1}, {"a": [1]}, [DEVICES[i] for i in (0, 2, 3, 6, 7)])


@pytest.mark.parametrize(
    ("alternatives", "message"),
    [
        ([[2, 3]], "cluster_device_alternatives must be a dict keyed by cluster name, got list"),
        ({"critic": [[2, 3]]}, "cluster 'critic' is not in cluster_device_mappings"),
        ({"actor_train": [2, 3]}, r"alternatives\[0\]: must be a list of device ids \(ints\), got 2"),
        ({"actor_train": 2}, "must be a list of lists of device ids, got 2"),
        ({"actor_train": [[]]}, r"alternatives\[0\]: is empty"),
        ({"actor_train": [[2, 3], [2, 9]]}, r"alternatives\[1\]: device 9 does not exist; this pool has devices 0-7"),
        ({"actor_train": [[2, 2]]}, "device 2 is named more than once"),
        ({"actor_infer": [[2, 3]]}, "'actor_infer': cluster_device_alternatives: rollouts are elastic"),
    ],
)
def test_a_mistake_in_alternatives_is_named_with_its_place(alternatives: Any, message: str) -> None:
    sizes, mappings = {"actor_train": 1, "actor_infer": 1}, {"actor_train": [0, 1], "actor_infer": [0, 1]}
    with pytest.raises(SpecError, match=message) as error:
        build_registration("ft_1", "ns", sizes, mappings, DEVICES, alternatives)
    assert "register_pipeline('ft_1')" in str(error.value)
