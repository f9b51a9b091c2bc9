"""The HTTP surface: FastAPI for what is read, plain ASGI endpoints for inference."""
