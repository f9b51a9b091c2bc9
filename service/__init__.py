"""Serves artefacts over HTTP. Never imports torch, onnx, model or export.

Inside, high to low: http > scheduler > engine, planner, codec > repository > tensors > artifact > errors.
"""
