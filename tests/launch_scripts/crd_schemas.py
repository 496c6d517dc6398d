"""The published schemas of Kubeflow's custom resources, as far as the manifests in launch_scripts/kubernetes need them.

    python tests/launch_scripts/crd_schemas.py FOLDER      writes crds/ anew from the definitions in a folder

FOLDER has manifests/base/crds/trainer.kubeflow.org_{trainjobs,clustertrainingruntimes}.yaml of kubeflow/trainer, and
manifests/base/kubeflow.org_mpijobs.yaml of kubeflow/mpi-operator. Their descriptions, fields that no manifest uses, and
rules in CEL are left out.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from kubeflow_operators import MANIFESTS, read_manifest

SCHEMAS = Path(__file__).with_name("crds")
DEFINITIONS = {
    "runtime.yaml": "trainer.kubeflow.org_clustertrainingruntimes.yaml",
    "trainjob.yaml": "trainer.kubeflow.org_trainjobs.yaml",
    "mpijob.yaml": "kubeflow.org_mpijobs.yaml",
}
"""The definition of each manifest's resource."""
NOTE = """\
# Copyright The Kubeflow Authors. Licensed under the Apache License, Version 2.0, as this project is (LICENSE).
# Changed: this is a part of the definition at {source}, written by ../crd_schemas.py.
"""
SOURCES = {
    "runtime.yaml": "https://github.com/kubeflow/trainer/tree/8c0f5059bd51ec3ba6d6a6a7b2e1471de7bc13b3",
    "trainjob.yaml": "https://github.com/kubeflow/trainer/tree/8c0f5059bd51ec3ba6d6a6a7b2e1471de7bc13b3",
    "mpijob.yaml": "https://github.com/kubeflow/mpi-operator/tree/caa3c47fc42eb762635f78045ec0fcd1a89eb038",
}

_METADATA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "required": ["name"],
}
"""The metadata of an object, which definitions leave to Kubernetes."""
_TYPES = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool}
_WITHOUT_EFFECT = frozenset(
    ("default", "description", "format", "x-kubernetes-list-type", "x-kubernetes-map-type", "x-kubernetes-validations")
)
_CHECKED = frozenset(
    (
        *("additionalProperties", "anyOf", "enum", "items", "maximum", "maxItems", "maxLength", "minimum", "minItems"),
        *("minLength", "minProperties", "pattern", "properties", "required", "type", "x-kubernetes-int-or-string"),
        "x-kubernetes-list-map-keys",
    )
)


def read_schema(manifest: str) -> dict[str, Any]:
    """Return the definition of a manifest's resource: apiVersion, kind and schema."""
    return yaml.safe_load((SCHEMAS / DEFINITIONS[manifest]).read_text())


def faults_of(definition: dict[str, Any], value: dict[str, Any]) -> list[str]:
    """Return the faults of an object as the API server finds them with strict validation of fields."""
    schema = definition["schema"]
    whole = schema | {"properties": schema["properties"] | {"metadata": _METADATA}}
    named = [f"{name}: {value.get(name)!r} is not {definition[name]!r}" for name in ("apiVersion", "kind")]
    wrong = [
        said for said, name in zip(named, ("apiVersion", "kind"), strict=True) if value.get(name) != definition[name]
    ]
    return wrong + list(_faults(whole, value, ""))


def _faults(schema: dict[str, Any], value: Any, path: str) -> Iterator[str]:
    if unknown := schema.keys() - _CHECKED - _WITHOUT_EFFECT:
        raise ValueError(f"{path}: the schema has keywords that are not checked: {', '.join(sorted(unknown))}")
    is_int_or_string = schema.get("x-kubernetes-int-or-string", False)
    expected = (int, str) if is_int_or_string else _TYPES[schema["type"]]
    if not isinstance(value, expected) or (isinstance(value, bool) and schema.get("type") != "boolean"):
        yield f"{path}: {value!r} is no {schema.get('type', 'integer or string')}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: {value!r} is none of {', '.join(map(repr, schema['enum']))}"
    if isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{path}: {value!r} does not match {schema['pattern']}"
    yield from _faults_of_size(schema, value, path)
    if isinstance(value, dict):
        yield from _faults_of_object(schema, value, path)
    if isinstance(value, list):
        yield from _faults_of_list(schema, value, path)


def _faults_of_size(schema: dict[str, Any], value: Any, path: str) -> Iterator[str]:
    kind = {str: "Length", list: "Items", dict: "Properties"}.get(type(value), "imum")
    size = value if kind == "imum" else len(value)
    if size < schema.get(f"min{kind}", size) or size > schema.get(f"max{kind}", size):
        yield f"{path}: {value!r} is too small or too large"


def _faults_of_object(schema: dict[str, Any], value: dict[str, Any], path: str) -> Iterator[str]:
    properties, others = schema.get("properties", {}), schema.get("additionalProperties")
    for name in schema.get("required", ()):
        if name not in value and "default" not in properties.get(name, {}):
            yield f"{path}.{name}: is missing"
    for name, each in value.items():
        inner = properties.get(name, others)
        if inner is None:
            yield f"{path}.{name}: unknown field"
        else:
            yield from _faults(inner, each, f"{path}.{name}")


def _faults_of_list(schema: dict[str, Any], value: list[Any], path: str) -> Iterator[str]:
    for index, each in enumerate(value):
        yield from _faults(schema["items"], each, f"{path}[{index}]")
    if keys := schema.get("x-kubernetes-list-map-keys"):
        named = [tuple(each.get(key) for key in keys) for each in value if isinstance(each, dict)]
        if len(set(named)) < len(named):
            yield f"{path}: two elements have the same {' and '.join(keys)}"


def part_of(schema: dict[str, Any], values: list[Any]) -> dict[str, Any]:
    """Return the part of a schema that concerns some values; the fields that an object requires stay."""
    kept = {name: each for name, each in schema.items() if name not in ("description", "x-kubernetes-validations")}
    if "properties" in schema:
        objects = [value for value in values if isinstance(value, dict)]
        used = {name for value in objects for name in value} | set(schema.get("required", ()))
        kept["properties"] = {
            name: part_of(each, [value[name] for value in objects if name in value])
            for name, each in schema["properties"].items()
            if name in used
        }
    if "items" in schema:
        kept["items"] = part_of(schema["items"], [each for value in values for each in value])
    if "additionalProperties" in schema:
        kept["additionalProperties"] = part_of(
            schema["additionalProperties"], [each for value in values for each in value.values()]
        )
    return kept


def write_schemas(folder: Path) -> None:
    """Write the parts of the definitions in a folder that the manifests need; refuse a manifest with a fault."""
    for manifest, name in DEFINITIONS.items():
        definition = yaml.load((folder / name).read_text(), Loader=yaml.CSafeLoader)["spec"]
        value = read_manifest(manifest)
        version = next(each for each in definition["versions"] if value["apiVersion"].endswith(f"/{each['name']}"))
        whole = {
            "apiVersion": f"{definition['group']}/{version['name']}",
            "kind": definition["names"]["kind"],
            "schema": version["schema"]["openAPIV3Schema"],
        }
        if faults := faults_of(whole, value):
            sys.exit("\n".join(f"{MANIFESTS / manifest}: {each}" for each in faults))
        part = whole | {"schema": part_of(whole["schema"], [value])}
        text = yaml.safe_dump(part, sort_keys=True, width=120)
        (SCHEMAS / name).write_text(NOTE.format(source=SOURCES[manifest]) + text)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write_schemas(Path(sys.argv[1]))
