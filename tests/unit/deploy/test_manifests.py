"""Manifests, compose files and alert rules against the schemas of the programs that read them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import msgspec
import promql_parser
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema
from jsonschema import Draft202012Validator, ValidationError

from service.config.settings import Settings
from service.config.sources import RESERVED_VARIABLES

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
VERSIONS = ("1.30", kubernetes_validate.latest_version().rpartition(".")[0])
KINDS = {"Deployment", "Service", "PodDisruptionBudget", "Namespace", "NetworkPolicy"}
TWO_GPUS = DEPLOY / "kubernetes-two-gpus"
"""A patch of the worker, which is complete only in `kubectl kustomize`."""
COMPOSE = ("compose.yaml", "compose.two-gpus.yaml")
COMPOSE_SCHEMA = Draft202012Validator(get_builtin_schema("vendor.compose-spec"))
KUBECTL, PROMTOOL = shutil.which("kubectl"), shutil.which("promtool")


class _Loader(yaml.SafeLoader):
    """Reads compose's !override."""


_Loader.add_constructor("!override", lambda loader, node: loader.construct_sequence(node, deep=True))


def documents(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.load_all(text, _Loader) if document]


def manifests() -> list[Path]:
    return sorted(path for path in KUBERNETES.iterdir() if path.name not in ("kustomization.yaml", "keda.yaml"))


def validate(document: dict[str, Any]) -> None:
    assert document["kind"] in KINDS
    for version in VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("path", manifests(), ids=lambda path: path.name)
def test_kubernetes_accepts_every_manifest(path):
    for document in documents(path.read_text()):
        validate(document)


def test_a_wrong_field_would_be_seen():
    document = documents((KUBERNETES / "gateway.yaml").read_text())[0]
    document["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(document)


@pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed, which builds kustomizations")
@pytest.mark.parametrize(("folder", "num_gpus"), [(KUBERNETES, 1), (TWO_GPUS, 2)])
def test_kustomize_builds_what_kubernetes_accepts(folder, num_gpus):
    done = subprocess.run([KUBECTL, "kustomize", folder], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    built = documents(done.stdout)
    for document in built:
        if document["kind"] != "ConfigMap":
            validate(document)
    (worker,) = (one for one in built if (one["kind"], one["metadata"]["name"]) == ("Deployment", "worker"))
    (container,) = worker["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == num_gpus
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in worker["spec"]["template"]["spec"]["volumes"]
    }


class Strict(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    pass


class Metadata(Strict):
    name: str
    namespace: str


class Target(Strict):
    name: str


class PrometheusTrigger(Strict):
    server_address: str
    query: str
    threshold: str  # numbers are texts here
    activation_threshold: str


class Trigger(Strict):
    type: str
    metadata: PrometheusTrigger


class ScaledObjectSpec(Strict):
    scale_target_ref: Target
    min_replica_count: int
    max_replica_count: int
    polling_interval: int
    cooldown_period: int
    triggers: list[Trigger]


class ScaledObject(msgspec.Struct, forbid_unknown_fields=True):
    apiVersion: str
    kind: str
    metadata: Metadata
    spec: ScaledObjectSpec


def test_keda_gets_the_fields_of_a_scaled_object():
    """keda.sh/v1alpha1, and its Prometheus scaler: no package for this Python has the schema."""
    (document,) = documents((KUBERNETES / "keda.yaml").read_text())
    found = msgspec.convert(document, ScaledObject)
    assert (found.apiVersion, found.kind) == ("keda.sh/v1alpha1", "ScaledObject")
    (worker,) = documents((KUBERNETES / "worker.yaml").read_text())
    assert found.spec.scale_target_ref.name == worker["metadata"]["name"]
    (trigger,) = found.spec.triggers
    assert trigger.type == "prometheus"
    promql_parser.parse(trigger.metadata.query)
    assert float(trigger.metadata.threshold) > float(trigger.metadata.activation_threshold)
    assert found.spec.min_replica_count < found.spec.max_replica_count


def compose(name: str) -> dict[str, Any]:
    (document,) = documents((DEPLOY / name).read_text())
    return document


@pytest.mark.parametrize("name", COMPOSE)
def test_compose_accepts_every_file(name):
    """Validate by compose-spec's schema, of the package check-jsonschema."""
    COMPOSE_SCHEMA.validate(compose(name))


@pytest.mark.parametrize("wrong", [{"helthcheck": {}}, {"ports": 8000}, {"deploy": {"resources": {"devices": []}}}])
def test_a_wrong_field_of_a_service_would_be_seen(wrong):
    document = compose("compose.yaml")
    document["services"]["gateway"] |= wrong
    with pytest.raises(ValidationError):
        COMPOSE_SCHEMA.validate(document)


@pytest.mark.parametrize("name", COMPOSE)
def test_services_name_what_is_there(name):
    document = compose(name)
    services = document["services"]
    known = {f"QUIRE_{setting.upper()}" for setting in Settings.__dataclass_fields__} | RESERVED_VARIABLES
    for service in services.values():
        assert set(service.get("environment", ())) <= known
        assert set(service.get("depends_on", ())) <= services.keys()
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            if source.startswith("./"):
                assert (DEPLOY / source).exists()
            elif not source.startswith("$"):
                assert source in document["volumes"]
        for device in devices_of(service):
            assert ("count" in device) != ("device_ids" in device)  # compose refuses both


def devices_of(service: dict[str, Any]) -> list[dict[str, Any]]:
    return service["deploy"]["resources"]["reservations"]["devices"] if "deploy" in service else []


def test_workers_of_two_gpus_have_one_each():
    services = compose("compose.two-gpus.yaml")["services"]
    assert [devices_of(services[name])[0]["device_ids"] for name in ("worker", "worker-1")] == [["0"], ["1"]]


class Rule(msgspec.Struct, forbid_unknown_fields=True):
    alert: str
    expr: str
    labels: dict[str, str]
    annotations: dict[str, str]
    for_: str = msgspec.field(name="for", default="0s")


class Group(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    rules: list[Rule]


class Rules(msgspec.Struct, forbid_unknown_fields=True):
    groups: list[Group]


def test_prometheus_can_read_every_alert():
    (document,) = documents((DEPLOY / "prometheus" / "alerts.yml").read_text())
    rules = [rule for group in msgspec.convert(document, Rules).groups for rule in group.rules]
    assert len({rule.alert for rule in rules}) == len(rules) > 5
    for rule in rules:
        promql_parser.parse(rule.expr)
        assert re.fullmatch(r"[0-9]+[smh]", rule.for_)
        assert rule.labels["severity"] in ("page", "warn")
        assert rule.annotations["summary"]


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed, which checks rules and their templates")
def test_promtool_accepts_the_rules():
    done = subprocess.run(
        [PROMTOOL, "check", "rules", DEPLOY / "prometheus" / "alerts.yml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_prometheus_can_read_every_panel():
    panels = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    assert len(expressions) > 10
    for expression in expressions:
        promql_parser.parse(re.sub(r"\$__(rate_)?interval", "1m", expression))


def test_a_wrong_expression_would_be_seen():
    with pytest.raises(ValueError, match="parenthesis"):
        promql_parser.parse("sum by engine (rate(quire:steps_total[1m])")
