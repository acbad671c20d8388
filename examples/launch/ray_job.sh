#!/bin/bash
# Jobs on a Ray cluster that runs already, from outside: examples/launch/ray_job.sh JOB.yaml
# RAY_API_SERVER_ADDRESS is the cluster's dashboard, such as http://head:8265. The folder of the job file goes along.
set -euo pipefail
job=${1:?usage: ray_job.sh JOB.yaml}
: "${RAY_API_SERVER_ADDRESS:?set it to the address of the dashboard, such as http://head:8265}"

ray job submit \
    --submission-id "rlix-$(basename "$job" .yaml)-$(date +%s)" \
    --working-dir "$(dirname "$job")" \
    --runtime-env-json '{"env_vars": {"RAY_ADDRESS": "auto"}}' \
    --entrypoint-num-cpus 1 \
    -- rlix run --no-live --resume --runs-dir "${RUNS_DIR:-/shared/runs}" "$(basename "$job")"
