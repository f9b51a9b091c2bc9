# The service as an image: `make image`, or `docker build .`. The targets are `cuda` and, as the last, `cpu`.
#
#   BASE       an image with Python 3.11 or newer and its venv module
#   ARTEFACTS  what stands in /models: `given`, the folder models/ of the build context if there is one, or
#              `exported`, the example layer, for which torch is installed in a stage that is thrown away
#   EXTRAS     more extras of pyproject.toml, separated by commas: `otel` for traces
ARG BASE=python:3.13-slim

FROM ${BASE} AS base
WORKDIR /src

# What the service runs on follows from two files, so a change of its code leaves these layers as they are.
FROM base AS requirements
ARG EXTRAS=
COPY pyproject.toml ./
RUN EXTRAS="$EXTRAS" python3 -c "import os, tomllib; \
project = tomllib.load(open('pyproject.toml', 'rb'))['project']; extras = project['optional-dependencies']; \
more = [line for extra in filter(None, os.environ['EXTRAS'].split(',')) for line in extras[extra]]; \
[open(f'/{extra}.txt', 'w').write('\n'.join([*project['dependencies'], *extras[extra], *more]) + '\n') for extra in ('cpu', 'gpu')]"

FROM base AS cpu-environment
COPY constraints.txt ./
COPY --from=requirements /cpu.txt ./
RUN python3 -m venv /opt/mha && /opt/mha/bin/pip install --no-cache-dir --constraint constraints.txt --requirement cpu.txt

FROM base AS cuda-environment
COPY constraints.txt ./
COPY --from=requirements /gpu.txt ./
RUN python3 -m venv /opt/mha && /opt/mha/bin/pip install --no-cache-dir --constraint constraints.txt --requirement gpu.txt

FROM base AS code
COPY pyproject.toml LICENSE README.md mha.py ./
COPY model model
COPY export export
COPY service service
COPY loadtest loadtest
COPY heads heads
RUN python3 -m venv /opt/build && /opt/build/bin/pip install --no-cache-dir hatchling \
 && /opt/build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

# Nothing in an environment needs pip once it is complete, nor the tests and type stubs of what it holds.
FROM cpu-environment AS cpu-complete
COPY --from=code /wheels /wheels
RUN /opt/mha/bin/pip install --no-deps /wheels/*.whl && /opt/mha/bin/pip uninstall --yes --quiet pip setuptools \
 && find /opt/mha -depth \( -type d -name tests -o -name '*.pyi' \) -exec rm -r {} +

FROM cuda-environment AS cuda-complete
COPY --from=code /wheels /wheels
RUN /opt/mha/bin/pip install --no-deps /wheels/*.whl && /opt/mha/bin/pip uninstall --yes --quiet pip setuptools \
 && find /opt/mha -depth \( -type d -name tests -o -name '*.pyi' \) -exec rm -r {} +

FROM cpu-environment AS artefacts
ARG ARTEFACTS=given
RUN case "$ARTEFACTS" in given) ;; \
      exported) /opt/mha/bin/pip install --no-cache-dir --constraint constraints.txt onnx onnxscript rich safetensors torch ;; \
      *) echo "ARTEFACTS is '$ARTEFACTS', want given or exported" >&2; exit 1 ;; esac
# The licence is there so that the copy finds something where there are no models.
COPY LICENSE model[s] /models/
COPY --from=code /wheels /wheels
RUN rm /models/LICENSE && if [ "$ARTEFACTS" = exported ]; then /opt/mha/bin/pip install --no-deps /wheels/*.whl \
 && /opt/mha/bin/mha export --num-hiddens 100 --num-heads 5 --seed 0 --out /models --name attention --version 1; fi

FROM ${BASE} AS runtime
COPY --from=artefacts /models /models
ENV PATH=/opt/mha/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    MHA_HOST=0.0.0.0 MHA_PORT=8000 MHA_MODELS=/models MHA_LOG_FORMAT=json
LABEL org.opencontainers.image.title="mha-service" \
      org.opencontainers.image.description="Multi-head attention as a service" \
      org.opencontainers.image.licenses="Apache-2.0"
USER 10001:10001
WORKDIR /
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s CMD ["mha", "health"]
ENTRYPOINT ["mha"]
CMD ["serve"]

FROM runtime AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=cuda-complete /opt/mha /opt/mha

FROM runtime AS cpu
COPY --from=cpu-complete /opt/mha /opt/mha
