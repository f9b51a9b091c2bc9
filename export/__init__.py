"""Turns a layer into a checked artefact. Imports model, torch, onnx and onnxruntime; never service."""

import os

# Before onnxruntime is imported, as in `service.engine`: it would tell Microsoft which graphs are loaded.
os.environ["ORT_DISABLE_TELEMETRY"] = os.environ.get("ORT_DISABLE_TELEMETRY") or "1"
