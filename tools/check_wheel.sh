#!/bin/sh
# Installs a wheel into new environments, where no compiler is on the PATH, and uses it there.
#
#   sh tools/check_wheel.sh dist/fewbit-*.whl [version of Python ...]     3.11 3.12 3.13
#
# WITH="jax==0.11.0" adds requirements of one's own.
set -eu

tools=$(cd "$(dirname "$0")" && pwd)
[ -f "${1:-}" ] || {
  echo "no wheel '${1:-}'; \`make wheel\` builds one" >&2
  exit 1
}
wheel=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
shift
[ $# -gt 0 ] || set -- 3.11 3.12 3.13

place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
missing=''
for version; do
  python=$(PYTHON='' sh "$tools/find_python.sh" "$version") || {
    missing="$missing $version"
    continue
  }
  "$python" -m venv "$place/$version"
  # Out of the checkout, whose sources would be imported instead, and away from the compiler.
  cd "$place"
  # shellcheck disable=SC2086  # several requirements, one word each
  PATH="$place/$version/bin" "$place/$version/bin/python" -m pip install --quiet --no-compile \
    "$wheel[flax]" ${WITH:-}
  PATH="$place/$version/bin" "$place/$version/bin/python" "$tools/check_wheel.py"
  rm -rf "${place:?}/$version"
done

if [ -n "$missing" ]; then
  echo "not checked, because there is no Python of that version here:$missing" >&2
  exit 1
fi
