#!/bin/sh
# Makes an environment (a folder of `python -m venv`) if there is none yet, or none that fits.
#
#   sh tools/make_env.sh <folder> [version ...]     versions in the order of preference, as in
#                                                   tools/find_python.sh, which looks for them
#
# One made by an older Python than is here now is made anew, so that tests run on the newest; one made
# by a Python that was asked for (PYTHON=) stays. <folder>/.python is written when it is made, and
# says by what: Makefile compares its date with what was installed.
set -eu

folder=$1
shift
[ $# -gt 0 ] || set -- 3.13 3.12 3.11
here=$(dirname "$0")

minor() { "$1" -I -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

python=''
if "$folder/bin/python" -I -c 'import pip' 2>/dev/null; then
  have=$(minor "$folder/bin/python")
  [ -f "$folder/.python" ] || echo "made by: Python $have" > "$folder/.python"
  asked=$(sed -n 's/^asked for: //p' "$folder/.python" 2>/dev/null || true)
  if [ -n "${PYTHON:-}" ]; then
    python=$(sh "$here/find_python.sh" 2>/dev/null) || sh "$here/find_python.sh"
    [ "$have" != "$(minor "$python")" ] || exit 0
    echo "$folder was made by Python $have; PYTHON=$PYTHON is another one: it is made anew"
  elif [ -n "$asked" ]; then
    echo "$folder stays on Python $have, asked for by PYTHON=$asked when it was made;" \
      "\`rm -rf $folder\` starts over"
    exit 0
  elif [ "$have" = "$1" ]; then
    exit 0
  else
    python=$(sh "$here/find_python.sh" "$@" 2>/dev/null) || exit 0
    [ "$have" != "$(minor "$python")" ] || exit 0
    echo "$folder was made by Python $have; there is Python $(minor "$python") now: it is made anew"
  fi
elif [ -e "$folder" ] && [ ! -f "$folder/pyvenv.cfg" ] && ! rmdir "$folder" 2>/dev/null; then
  echo "$folder is there and is no Python environment; move it away" >&2
  exit 1
elif [ -e "$folder" ]; then
  echo "The Python of $folder does not run any more: it is made anew"
fi

[ -n "$python" ] || python=$(sh "$here/find_python.sh" "$@")
rm -rf "$folder"
"$python" -m venv "$folder"
{
  echo "made by: $python"
  [ -z "${PYTHON:-}" ] || echo "asked for: $PYTHON"
} > "$folder/.python"
