"""Kubernetes manifests as kustomize makes them, as far as ours ask for it, so that tests need no kustomize.

It knows `resources`, `components`, `patches` by path, `images` and `configMapGenerator`, and refuses every other field
and patches of lists other than `containers`. It leaves out the hash that a generated name ends with. Where kubectl is,
a test compares the two.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

Object = dict[str, Any]

_KNOWN: Final = {"apiVersion", "kind", "resources", "components", "patches", "images", "configMapGenerator"}


def load(path: Path) -> Object:
    """The one object of a file."""
    (found,) = yaml.safe_load_all(path.read_text())
    return dict(found)


def render(folder: Path) -> list[Object]:
    """The objects of the kustomization in a folder.

    Raises:
        ValueError: it asks for something that is not known here.
    """
    return list(_extended({}, folder).values())


def _extended(objects: dict[tuple[str, str], Object], folder: Path) -> dict[tuple[str, str], Object]:
    kustomization = load(folder / "kustomization.yaml")
    if unknown := set(kustomization) - _KNOWN:
        raise ValueError(f"{folder / 'kustomization.yaml'}: this loader does not know {sorted(unknown)}")
    objects = dict(objects)
    for name in kustomization.get("resources", ()):
        path = folder / name
        objects |= _extended({}, path) if path.is_dir() else _by_name([load(path)])
    for generator in kustomization.get("configMapGenerator", ()):
        _generate(objects, generator, folder)
    for name in kustomization.get("components", ()):
        objects = _extended(objects, folder / name)
    for patch in kustomization.get("patches", ()):
        ((key, change),) = _by_name([load(folder / patch["path"])]).items()
        objects[key] = _merged(objects[key], change)
    for image in kustomization.get("images", ()):
        for container in (one for found in objects.values() for one in containers(found)):
            if container["image"] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"
    return objects


def containers(found: Object) -> list[Object]:
    """The containers of a Pod or of an object with a template for one; none for other objects."""
    spec = pod_spec(found)
    return [] if spec is None else spec["containers"]


def pod_spec(found: Object) -> Object | None:
    """What says how a pod is run: a Pod's own spec, or that of a template."""
    return found["spec"] if found["kind"] == "Pod" else found.get("spec", {}).get("template", {}).get("spec")


def _by_name(objects: list[Object]) -> dict[tuple[str, str], Object]:
    return {(one["kind"], one["metadata"]["name"]): one for one in objects}


def _generate(objects: dict[tuple[str, str], Object], generator: Object, folder: Path) -> None:
    name = generator["name"]
    lines = [line for file in generator.get("envs", ()) for line in (folder / file).read_text().splitlines()]
    data = dict(_pairs([*lines, *generator.get("literals", ())]))
    if generator.get("behavior") == "merge":
        data = {**objects["ConfigMap", name]["data"], **data}
    objects["ConfigMap", name] = {
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data,
    }  # fmt: skip


def _pairs(lines: list[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        if line and not line.startswith("#"):
            name, _, value = line.partition("=")
            yield name, value


def _merged(one: Any, change: Any, field: str = "") -> Any:
    if isinstance(one, dict) and isinstance(change, dict):
        return one | {key: _merged(one.get(key), value, key) for key, value in change.items()}
    if isinstance(one, list) and field == "containers":
        changes = {entry["name"]: entry for entry in change}
        return [_merged(entry, changes.get(entry["name"], {})) for entry in one]
    if isinstance(one, list):
        raise ValueError(f"{field}: this loader does not know how a patch changes it")  # noqa: TRY004  # no caller passed it
    return change
