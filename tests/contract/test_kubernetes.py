"""What lies in deploy/kubernetes and deploy/kserve fits Kubernetes, and fits the product.

Kubernetes' part: every object, as kustomize would render it, against the published JSON schemas of the oldest release
that the manifests are for and of the newest one in kubernetes-validate, where an unknown field is an error. A schema
knows fields and types; it does not know what an API server checks beyond that (names, that a probe has one action,
admission), nor whether an image, a claim, a StorageClass or a metric is there. No cluster was asked.

PodMonitor, InferenceService, ServingRuntime and the adapter's values have no schema there. KServe's containers are
checked as those of a pod; the rest against fields written down by hand from the projects' references (KServe 0.21),
which proves that nothing was misspelt, not that a controller does what is hoped for.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from service.errors import StartupError
from service.metrics import Metrics
from service.processes.parent import _GRACE_S
from service.settings import Settings, environment_name, load_settings
from tests.manifests import Object, containers, load, pod_spec, render
from tests.served import ServerProcess

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
KSERVE = ROOT / "deploy" / "kserve"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
MIB = 1024 * 1024

# preStop.sleep is there from 1.30 on.
RELEASES = ("1.30", kubernetes_validate.latest_version().removesuffix(".0"))
WITHOUT_SCHEMA = {"PodMonitor"}
# Fields of KServe's v1beta1 PredictorSpec beside those of a pod, and of its v1alpha1 ServingRuntimeSpec.
PREDICTOR = {"model", "minReplicas", "maxReplicas", "scaleMetric", "scaleTarget"}
RUNTIME = {"annotations", "supportedModelFormats", "protocolVersions", "containers"}


@pytest.fixture
def everything(tmp_path: Path) -> Path:
    """A kustomization of the base with every component, with the folder's own images."""
    components = sorted(folder.relative_to(KUBERNETES) for folder in (KUBERNETES / "components").iterdir())
    top = load(KUBERNETES / "kustomization.yaml") | {"components": [str(one) for one in components]}
    shutil.copytree(KUBERNETES, tmp_path / "all")
    (tmp_path / "all" / "kustomization.yaml").write_text(yaml.safe_dump(top))
    return tmp_path / "all"


def rendered() -> dict[str, list[Object]]:
    """What can be applied, by what one would apply."""
    return {
        "plain": render(KUBERNETES),
        "gpu": render(KUBERNETES / "overlays" / "gpu"),
        "loader": [load(KUBERNETES / "examples" / "models-loader.yaml")],
    }


def one(objects: list[Object], kind: str) -> Object:
    """The only object of a kind."""
    (found,) = (one for one in objects if one["kind"] == kind)
    return found


def by_kind(objects: list[Object]) -> dict[str, Object]:
    """Objects by their kind, of which there is one each."""
    kinds = {found["kind"]: found for found in objects}
    assert len(kinds) == len(objects)
    return kinds


def serving_runtime() -> Object:
    return load(KSERVE / "serving-runtime.yaml")


def inference_service() -> Object:
    return load(KSERVE / "inference-service.yaml")


def image_environment() -> dict[str, str]:
    """The settings that the image brings along."""
    return dict(re.findall(r"\b(MHA_\w+)=(\S+)", DOCKERFILE))


def deployments() -> dict[str, tuple[Object, Object, dict[str, str]]]:
    """Of each way to run the server: the pod's spec, the server's container, and its settings beside the image's."""
    ways = {}
    for name in ("plain", "gpu"):
        objects = rendered()[name]
        spec = pod_spec(one(objects, "Deployment"))
        assert spec is not None
        (container,) = spec["containers"]
        assert container["envFrom"] == [{"configMapRef": {"name": one(objects, "ConfigMap")["metadata"]["name"]}}]
        ways[name] = (spec, container, one(objects, "ConfigMap")["data"])
    predictor = inference_service()["spec"]["predictor"]
    (container,) = serving_runtime()["spec"]["containers"]
    ways["kserve"] = (predictor, container, {entry["name"]: entry["value"] for entry in container["env"]})
    return ways


WAYS = deployments()
Way = tuple[Object, Object, dict[str, str]]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    """Each way to run the server."""
    return WAYS[request.param]


def settings_of(way: Way) -> Settings:
    """What the server makes of the image's environment and the manifests'."""
    return load_settings({}, image_environment() | way[2]).settings


def quantity(text: str) -> float:
    """A quantity of Kubernetes as a number."""
    number, unit = re.fullmatch(r"([\d.]+)(m|Mi|Gi|)", str(text)).groups()  # type: ignore[union-attr]
    return float(number) * {"": 1, "m": 1e-3, "Mi": MIB, "Gi": 1024 * MIB}[unit]


def port_of(container: Object, port: str | int) -> int:
    """A port of a container by its number or name."""
    numbers = {entry.get("name"): entry["containerPort"] for entry in container["ports"]}
    return int(numbers.get(port, port))


def probes(container: Object) -> Iterator[tuple[str, Object]]:
    """Every probe of a container, which has all three."""
    for kind in ("startup", "readiness", "liveness"):
        yield kind, container[f"{kind}Probe"]["httpGet"]


class TestSchemas:
    @pytest.mark.parametrize("release", RELEASES)
    @pytest.mark.parametrize("name", rendered())
    def test_objects(self, name: str, release: str) -> None:
        """Each object is what Kubernetes' schema of its kind wants, with no field that it does not know."""
        for found in rendered()[name]:
            assert kubernetes_validate.validate(found, release, strict=True) == release

    @pytest.mark.parametrize("release", RELEASES)
    def test_components(self, everything: Path, release: str) -> None:
        """So is each with every component, but for the kinds that are not Kubernetes' own."""
        objects = render(everything)
        assert {found["kind"] for found in objects} >= {"PersistentVolumeClaim", "PodMonitor"}
        for found in objects:
            if found["kind"] not in WITHOUT_SCHEMA:
                assert kubernetes_validate.validate(found, release, strict=True) == release

    @pytest.mark.parametrize("path", sorted((KUBERNETES / "base").glob("*.yaml")), ids=lambda path: path.stem)
    def test_files_are_whole(self, path: Path) -> None:
        """Each file of the base can be checked and applied alone."""
        if path.stem != "kustomization":
            assert kubernetes_validate.validate(load(path), RELEASES[0], strict=True) == RELEASES[0]

    @pytest.mark.parametrize("release", RELEASES)
    def test_kserve_containers(self, release: str) -> None:
        """The containers of the ServingRuntime, and the pod's fields of the predictor, are those of a pod."""
        spec, container, _ = WAYS["kserve"]
        fields = {name: spec[name] for name in set(spec) - PREDICTOR}
        assert fields
        spec = fields | {"containers": [container]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
        assert kubernetes_validate.validate(pod, release, strict=True) == release


class TestRendering:
    @pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl to compare with")
    @pytest.mark.parametrize("folder", [".", "overlays/gpu", "all components"])
    def test_as_kubectl(self, everything: Path, folder: str) -> None:
        """The tests' own rendering is kustomize's, but for the hash in a generated name."""
        path = everything if folder == "all components" else KUBERNETES / folder
        command = ["kubectl", "kustomize", str(path)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        theirs = list(yaml.safe_load_all(re.sub(r"(mha-settings)-[a-z0-9]{10}\b", r"\1", text)))
        assert by_kind(theirs) == by_kind(render(path))

    def test_unknown_is_refused(self, tmp_path: Path) -> None:
        """A kustomization that asks for more than the tests can render is an error, not an object less."""
        (tmp_path / "kustomization.yaml").write_text("resources: []\nreplacements: []\n")
        with pytest.raises(ValueError, match="replacements"):
            render(tmp_path)


class TestSettings:
    def test_start_up(self, way: Way) -> None:
        """The server accepts the image's settings and the manifests' together."""
        settings = settings_of(way)
        assert settings.model_dump().items() >= {"host": "0.0.0.0", "log_format": "json"}.items()  # noqa: S104

    @pytest.mark.parametrize(
        "path",
        sorted(path for folder in (KUBERNETES, KSERVE) for path in folder.rglob("*") if path.is_file()),
        ids=lambda path: str(path.relative_to(ROOT / "deploy")),
    )
    def test_names(self, path: Path) -> None:
        """Every MHA_ name, in comments and documents as well, is a setting."""
        known = {environment_name(setting) for setting in Settings.model_fields}
        assert set(re.findall(r"\bMHA_[A-Z0-9_]*[A-Z0-9]", path.read_text())) <= known

    @pytest.mark.parametrize("path", [KUBERNETES / "README.md", KSERVE / "README.md"], ids=["kubernetes", "kserve"])
    def test_links(self, path: Path) -> None:
        """Every relative link of the documents leads to a file or a folder."""
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text()):
            assert (path.parent / target).exists(), target

    def test_no_service_links(self, way: Way) -> None:
        """A Service called mha would set MHA_PORT to tcp://..., with which the server does not start."""
        with pytest.raises(StartupError, match="MHA_PORT"):
            load_settings({}, {"MHA_PORT": "tcp://10.0.0.1:80"})
        assert way[0]["enableServiceLinks"] is False

    def test_models_are_mounted_where_they_are_read(self, everything: Path) -> None:
        """The volume is mounted where the image looks for models, below its root, and read-only."""
        (container,) = containers(one(render(everything), "Deployment"))
        (mount,) = container["volumeMounts"]
        assert mount["mountPath"] == image_environment()["MHA_MODELS"]
        assert (mount["subPath"], mount["readOnly"]) == ("models", True)


class TestProbes:
    def test_routes(self, way: Way, server: ServerProcess) -> None:
        """Every probe asks for a route that a server answers, at the port that the image exposes."""
        _, container, _ = way
        for kind, get in probes(container):
            assert server.client.get(get["path"]).status_code == 200, kind
            assert get["path"].endswith({"startup": "startup", "readiness": "ready", "liveness": "live"}[kind])
            assert port_of(container, get["port"]) == settings_of(way).port

    def test_liveness_is_the_slowest_to_give_up(self, way: Way) -> None:
        """A pod is taken out long before it is restarted, and has a minute or more to load its models."""
        gives_up_s = {
            kind: way[1][f"{kind}Probe"]["periodSeconds"] * way[1][f"{kind}Probe"]["failureThreshold"]
            for kind in ("startup", "readiness", "liveness")
        }
        assert gives_up_s["liveness"] >= 3 * gives_up_s["readiness"]
        assert gives_up_s["startup"] >= 60


class TestEnd:
    def test_grace(self, way: Way) -> None:
        """The period of grace is longer than preStop, the drain delay, the drain timeout and the killing together."""
        spec, container, _ = way
        settings = settings_of(way)
        hook_s = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        longest_s = hook_s + settings.drain_delay_s + settings.drain_timeout_s + _GRACE_S
        assert spec["terminationGracePeriodSeconds"] >= longest_s

    def test_endpoints_have_time_once(self, way: Way) -> None:
        """From a pod's removal to the end of accepting it is 5 s or more, by the hook or the drain delay, not both."""
        hook_s = way[1].get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        given = [seconds for seconds in (hook_s, settings_of(way).drain_delay_s) if seconds]
        assert len(given) == 1
        assert given[0] >= 5

    def test_accepted_requests_have_time(self, way: Way) -> None:
        """A request that was accepted last may take all the time that a request has."""
        settings = settings_of(way)
        assert settings.drain_timeout_s * 1000 >= settings.timeout_ms


class TestResources:
    def test_guaranteed(self, way: Way) -> None:
        """Requests are limits, and CPUs are whole ones."""
        resources = way[1]["resources"]
        assert resources["requests"] == resources["limits"]
        assert quantity(resources["limits"]["cpu"]) == int(quantity(resources["limits"]["cpu"])) >= 1

    def test_memory(self, way: Way) -> None:
        """What the settings let a pod hold, as deployment.yaml adds it up, fits the memory limit."""
        limits, settings = way[1]["resources"]["limits"], settings_of(way)
        calls = int(quantity(limits["cpu"]))
        held = settings.max_queue_bytes + calls * settings.workspace_bytes
        json_bytes = min(calls, 4) * (20 * settings.max_body_bytes + 6 * settings.max_answer_bytes)
        assert 700 * MIB + held + json_bytes <= quantity(limits["memory"])

    def test_one_process_can_hold_a_request(self, way: Way) -> None:
        """A process's share of what may be held is enough for the largest body and the largest answer."""
        settings, calls = settings_of(way), int(quantity(way[1]["resources"]["limits"]["cpu"]))
        assert settings.max_body_bytes + settings.max_answer_bytes <= settings.max_queue_bytes / min(calls, 4)


class TestSecurity:
    def test_user(self, way: Way) -> None:
        """The user and group are the image's, and not root."""
        spec, container, _ = way
        context = spec.get("securityContext", {}) | container["securityContext"]
        (ids,) = re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE)
        assert (str(context["runAsUser"]), str(context["runAsGroup"])) == ids
        assert context["runAsNonRoot"] is True

    @pytest.mark.parametrize("name", [*WAYS, "loader"])
    def test_restricted(self, name: str) -> None:
        """Every pod fits the Pod Security Standard `restricted`, and has a read-only root and no token."""
        loader = rendered()["loader"][0]
        spec, container = (loader["spec"], containers(loader)[0]) if name == "loader" else WAYS[name][:2]
        context = spec.get("securityContext", {}) | container["securityContext"]
        assert context["runAsNonRoot"] is context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is spec["automountServiceAccountToken"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}

    def test_no_telemetry(self, way: Way) -> None:
        """The runtime keeps to itself what it computes."""
        assert way[2]["ORT_DISABLE_TELEMETRY"] == "1"


class TestParts:
    """Everything that names something else names what is there."""

    def test_port(self, way: Way) -> None:
        """The container's port is the one that the image exposes and listens on."""
        (entry,) = way[1]["ports"]
        (exposed,) = re.findall(r"^EXPOSE (\d+)$", DOCKERFILE, re.MULTILINE)
        assert entry["containerPort"] == int(exposed) == settings_of(way).port

    @pytest.mark.parametrize("name", ["plain", "gpu"])
    def test_selectors(self, name: str) -> None:
        """Deployment, Service, disruption budget and spreading all mean the Deployment's own pods."""
        objects = rendered()[name]
        template = one(objects, "Deployment")["spec"]["template"]
        labels = template["metadata"]["labels"]
        assert one(objects, "Deployment")["spec"]["selector"] == {"matchLabels": labels}
        assert one(objects, "Service")["spec"]["selector"] == labels
        assert one(objects, "PodDisruptionBudget")["spec"]["selector"] == {"matchLabels": labels}
        for spread in template["spec"]["topologySpreadConstraints"]:
            assert spread["labelSelector"] == {"matchLabels": labels}

    @pytest.mark.parametrize("name", ["plain", "gpu"])
    def test_service_port(self, name: str) -> None:
        """The Service leads to a port of the container."""
        objects = rendered()[name]
        (container,) = containers(one(objects, "Deployment"))
        (port,) = one(objects, "Service")["spec"]["ports"]
        assert port_of(container, port["targetPort"]) == container["ports"][0]["containerPort"]

    def test_rollout(self) -> None:
        """No pod goes before its successor is ready, but where a successor would want a GPU more."""
        strategies = {
            name: one(rendered()[name], "Deployment")["spec"]["strategy"]["rollingUpdate"] for name in ("plain", "gpu")
        }
        assert strategies["plain"] == {"maxUnavailable": 0, "maxSurge": 1}
        assert strategies["gpu"] == {"maxUnavailable": 1, "maxSurge": 0}

    def test_gpu(self) -> None:
        """The overlay for a GPU asks for one, and for a server that does not do without."""
        _, container, _ = WAYS["gpu"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert container["image"].endswith(":cuda")
        assert settings_of(WAYS["gpu"]).device == "cuda"
        assert re.search(r"^FROM runtime AS cuda$", DOCKERFILE, re.MULTILINE)


class TestScaling:
    def test_target(self) -> None:
        """The autoscaler scales the Deployment, which leaves the number of pods to it."""
        objects = render(KUBERNETES)
        deployment = one(objects, "Deployment")
        target = one(objects, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
        assert target == {
            "apiVersion": deployment["apiVersion"], "kind": "Deployment", "name": deployment["metadata"]["name"],
        }  # fmt: skip
        assert "replicas" not in deployment["spec"]

    def test_metric(self) -> None:
        """The metric of pods is a gauge that the service exposes, and its target lies below what is refused."""
        metric = one(render(KUBERNETES), "HorizontalPodAutoscaler")["spec"]["metrics"][0]["pods"]
        assert f"# TYPE {metric['metric']['name']} gauge\n" in Metrics().exposition().decode()
        assert 0 < quantity(metric["target"]["averageValue"]) < settings_of(WAYS["plain"]).max_queue_ms / 1000

    def test_adapter(self) -> None:
        """The adapter's rule makes that metric, of pods in namespaces, out of the series of the same name."""
        metric = one(render(KUBERNETES), "HorizontalPodAutoscaler")["spec"]["metrics"][0]["pods"]["metric"]["name"]
        (rule,) = load(KUBERNETES / "examples" / "prometheus-adapter.yaml")["rules"]["custom"]
        assert set(rule) == {"seriesQuery", "resources", "name", "metricsQuery"}
        assert rule["seriesQuery"].startswith(f"{metric}{{")
        assert re.fullmatch(rule["name"]["matches"], metric)
        assert rule["name"]["as"] == metric
        assert rule["resources"]["overrides"] == {name: {"resource": name} for name in ("namespace", "pod")}

    def test_scrape(self, everything: Path, server: ServerProcess) -> None:
        """Annotations, the PodMonitor and KServe's annotations lead to a page that has the metric."""
        objects = render(everything)
        (container,) = containers(one(objects, "Deployment"))
        annotations = one(objects, "Deployment")["spec"]["template"]["metadata"]["annotations"]
        monitor = one(objects, "PodMonitor")
        assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
        assert monitor["spec"]["selector"] == one(objects, "Deployment")["spec"]["selector"]
        assert set(monitor["spec"]) == {"selector", "podMetricsEndpoints"}
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert set(endpoint) == {"port", "path", "interval", "scrapeTimeout"}
        kserve = serving_runtime()["spec"]["annotations"]
        for port, path in (
            (annotations["prometheus.io/port"], annotations["prometheus.io/path"]),
            (endpoint["port"], endpoint["path"]),
            (kserve["prometheus.kserve.io/port"], kserve["prometheus.kserve.io/path"]),
        ):
            assert port_of(container, port) == container["ports"][0]["containerPort"]
            assert "\nmha_queue_wait_seconds " in server.client.get(path).text


class TestKServe:
    def test_kinds(self) -> None:
        """The objects are of the versions that KServe serves."""
        assert (serving_runtime()["apiVersion"], serving_runtime()["kind"]) == (
            "serving.kserve.io/v1alpha1",
            "ServingRuntime",
        )
        assert (inference_service()["apiVersion"], inference_service()["kind"]) == (
            "serving.kserve.io/v1beta1",
            "InferenceService",
        )

    def test_fields(self) -> None:
        """What is not a pod's field is one that KServe has."""
        spec = serving_runtime()["spec"]
        assert set(spec) == RUNTIME
        assert [set(entry) for entry in spec["supportedModelFormats"]] == [{"name", "version", "autoSelect"}]
        predictor: dict[str, Any] = inference_service()["spec"]["predictor"]
        assert set(predictor) >= PREDICTOR
        assert set(predictor["model"]) == {"runtime", "modelFormat", "protocolVersion", "storageUri"}

    def test_pair(self) -> None:
        """The InferenceService asks for the runtime that is there, in a format and a protocol that it has."""
        runtime, model = serving_runtime(), inference_service()["spec"]["predictor"]["model"]
        assert model["runtime"] == runtime["metadata"]["name"]
        formats = [{"name": one["name"], "version": one["version"]} for one in runtime["spec"]["supportedModelFormats"]]
        assert model["modelFormat"] in formats
        assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]

    def test_models(self) -> None:
        """The server reads models where KServe mounts them, and KServe finds its container by its name."""
        assert settings_of(WAYS["kserve"]).models == Path("/mnt/models")
        assert WAYS["kserve"][1]["name"] == "kserve-container"

    def test_same_limits(self) -> None:
        """KServe's pods have the resources of the others, and the settings that go with them."""
        _, ours, settings = WAYS["plain"]
        _, theirs, environment = WAYS["kserve"]
        assert theirs["resources"] == ours["resources"]
        different = {"MHA_MODELS", "MHA_DRAIN_DELAY_S"}
        assert {name: value for name, value in environment.items() if name not in different} == {
            name: value for name, value in settings.items() if name not in different
        }

    def test_protocol(self, server: ServerProcess) -> None:
        """The name of the InferenceService is that of a model for who speaks the protocol."""
        name = inference_service()["metadata"]["name"]
        assert server.client.get(f"/v2/models/{name}/ready").status_code == 200
