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
        ({"trainer": 1}, {"trainer": [0]}, "unknown cluster 'trainer'; clusters are: actor_train, actor_infer"),
        ({7: 1}, {7: [0]}, "unknown cluster 7"),
        ({"actor_train": 1, "critic": 1}, {"actor_train": [0]}, "'critic' is in cluster_tp_configs but not in"),
        ({"actor_train": 1}, {"actor_train": [0], "critic": [1]}, "'critic' is in cluster_device_mappings but not in"),
        ({"actor_train": 0}, {"actor_train": [0]}, "'actor_train': cluster_tp_configs: .*at least 1, got 0"),
        ({"actor_train": True}, {"actor_train": [0]}, "must be an int, got True"),
        ({"actor_train": "2"}, {"actor_train": [0, 1]}, "must be an int, got '2'"),
        ({"actor_train": 2}, {"actor_train": [0, 1, 2]}, "size 2 does not divide its 3 devices"),
        ({"actor_train": 1}, {"actor_train": [0, 0]}, "device 0 is named more than once"),
        ({"actor_train": 1}, {"actor_train": [8]}, "device 8 does not exist; this pool has devices 0-7"),
        ({"actor_train": 1}, {"actor_train": [-1]}, "device -1 does not exist"),
        ({"actor_train": 1}, {"actor_train": []}, "'actor_train': cluster_device_mappings: is empty"),
        ({"actor_train": 1}, {"actor_train": "01"}, "must be a list of device ids"),
        ({"actor_train": 1}, {"actor_train": [0.0]}, "must be a list of device ids"),
        ({"actor_infer": 2}, {"actor_infer": [0, 1, 3, 4]}, r"bundle 1 \(devices \[3, 4\]\) is spread over 2 nodes"),
    ],
)
def test_a_mistake_is_named_with_its_place(sizes: Any, mappings: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message) as error:
        build(sizes, mappings)
    assert "register_pipeline('ft_1')" in str(error.value)


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
        ("actor_infer", Phase.INITIALIZATION, "rollouts are elastic .* call report_demand"),
        ("actor_train", Phase.ROLLOUT, "rollouts are elastic"),
        ("actor_train", 9, "unknown phase 9; phases are: INITIALIZATION=0"),
        ("actor_train", "actor_training", "unknown phase 'actor_training'"),
        ("actor_train", True, "unknown phase True"),
        ("critic", Phase.CRITIC_TRAINING, "cluster 'critic' is not registered; this pipeline registered: actor_train"),
    ],
)
def test_gang_requests_that_make_no_sense(cluster: str, phase: Any, message: str) -> None:
    registration = build({"actor_train": 1, "actor_infer": 1}, {"actor_train": [0], "actor_infer": [0]})
    with pytest.raises(SpecError, match=message):
        check_gang_request(registration, cluster, phase)
    assert check_gang_request(registration, "actor_train", 1).devices == (0,)


def test_only_the_rollout_cluster_reports_demand() -> None:
    registration = build({"actor_train": 1, "actor_infer": 1}, {"actor_train": [0], "actor_infer": [0]})
    assert check_rollout_cluster(registration, "actor_infer").name == "actor_infer"
    with pytest.raises(SpecError, match="'actor_train' is not elastic"):
        check_rollout_cluster(registration, "actor_train")


def test_alternatives_are_taken_as_declared() -> None:
    registration = build_registration(
        "ft_1", "ns", {"actor_train": 1}, {"actor_train": [0, 1]}, DEVICES, {"actor_train": [[2, 3], [5, 4]]}
    )
    cluster = registration.cluster("actor_train")
    assert cluster.alternatives == ((2, 3), (5, 4))
    assert cluster.choices == ((0, 1), (2, 3), (5, 4))


@pytest.mark.parametrize(
    ("alternatives", "message"),
    [
        ([[2, 3]], "cluster_device_alternatives must be a dict keyed by cluster name, got list"),
        ({"critic": [[2, 3]]}, "cluster 'critic' is not in cluster_device_mappings"),
        ({"actor_train": [2, 3]}, r"alternatives\[0\]: must be a list of device ids \(ints\), got 2"),
        ({"actor_train": 2}, "must be a list of lists of device ids, got 2"),
        ({"actor_train": [[2]]}, r"alternatives\[0\]: has 1 devices, the cluster 2; name as many"),
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
