#!/bin/sh
# Build the wheel, install it into an environment that has all but tierstate, and run the tests against it.
# usage: against_wheel.sh BIN DEV_PYTHON [PYTEST OPTION ...]    (DEV_PYTHON has `build` and `setuptools`)
set -eu
bin=$(cd "$1" && pwd)
dev_python=$2
shift 2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$dev_python" -m build --quiet --wheel --no-isolation --outdir "$work/dist" .
"$bin/pip" uninstall -qq --yes tierstate
"$bin/pip" install --quiet --constraint constraints.txt "$work"/dist/*.whl
# What the tests read beside the package; the package itself stays behind, so that only the wheel can be imported.
mkdir "$work/tree"
cp -r tests examples benchmarks docs README.md pyproject.toml constraints*.txt "$work/tree"
# The real S3 server stays installed beside the checkout, for the next time.
export TIERSTATE_SWIFT_VENV="${TIERSTATE_SWIFT_VENV:-$PWD/.venv-swift}"
cd "$work/tree"
# Compiles all once, which each worker would do by itself, as they start together. An error is told below.
"$bin/pytest" -q --collect-only > "$work/collected" 2>&1 || true
"$bin/pytest" -q -m "not soak" "$@"
