"""Turns a layer into a checked artefact. Imports model, torch, onnx and onnxruntime; never service."""
