#!/bin/sh
# Prints the path of the newest Python that really runs and can make environments.
#
#   sh tools/find_python.sh [version ...]     versions in the order of preference: 3.13 3.12 3.11
#
# PYTHON=<command or path>, if set and not empty, is the only one looked at. What was found is said
# on stderr. A file on the PATH is not enough: version managers leave shims there that only print an
# error, so each candidate is asked; and their real Pythons are looked for where they keep them.
set -u

[ $# -gt 0 ] || set -- 3.13 3.12 3.11
refused=''

# What a Python must be able to do, and what it then says of itself.
question='
import sys
if sys.version_info < (3, 11):
    sys.exit("is Python %d.%d; 3.11 or newer is needed" % sys.version_info[:2])
if sys.implementation.name != "cpython":
    sys.exit("is %s, which our dependencies do not know" % sys.implementation.name)
import sysconfig
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit("is free-threaded, which our dependencies are not")
try:
    import ensurepip, venv
except ImportError as error:
    sys.exit("%s; on Debian `apt-get install python3-venv` brings it" % error)
path = sys.executable
if sys.prefix != sys.base_prefix:  # an environment, which may be the one to be made anew
    path = "%s/bin/python%d.%d" % (sys.base_prefix, *sys.version_info[:2])
print("%d.%d.%d %s" % (*sys.version_info[:3], path))
'

# ask <path> <version wanted, empty for any>: ends with the Python that answers as wanted, or notes
# in `refused` why not.
ask() {
  [ -x "$1" ] && [ ! -d "$1" ] || return 0
  if answer=$("$1" -I -c "$question" 2>&1 </dev/null); then
    answer=$(printf '%s\n' "$answer" | sed -n '$p')  # before it wrappers and the linker may warn
    case $answer in
      "${2:-3}".*)
        echo "Python ${answer%% *}: ${answer#* }" >&2
        printf '%s\n' "${answer#* }"
        exit 0
        ;;
    esac
    answer="is Python ${answer%% *}"
  fi
  answer=$(printf '%s\n' "$answer" | sed -n '/./{p;q;}')
  refused="$refused
  $1: ${answer:-does not run}"
}

# on_path <name>: every file of that name on the PATH, not only the first.
on_path() {
  printf '%s\n' "${PATH:-}" | tr ':' '\n' | while IFS= read -r folder; do
    [ -n "$folder" ] && [ -x "$folder/$1" ] && printf '%s\n' "$folder/$1"
  done
}

# kept <version>: where pyenv and uv keep it, the newest patch first.
kept() {
  home=${HOME:-/nonexistent}
  for root in "${PYENV_ROOT:-$home/.pyenv}/versions" "$home/.pyenv/versions"; do
    newest_first "$root" '' "$1"
  done
  for root in "${UV_PYTHON_INSTALL_DIR:-$home/.local/share/uv/python}" \
    "${XDG_DATA_HOME:-$home/.local/share}/uv/python" "$home/.local/share/uv/python"; do
    newest_first "$root" 'cpython-' "$1"
  done
}

# newest_first <folder> <prefix> <version>: <folder>/<prefix><version>.<patch>*/bin/python<version>
newest_first() {
  for candidate in "$1/$2$3".[0-9]*/bin/python"$3"; do
    [ -x "$candidate" ] || continue
    patch=${candidate#"$1/$2$3."}
    printf '%s %s\n' "${patch%%[!0-9]*}" "$candidate"
  done | sort -rn | cut -d ' ' -f 2-
}

if [ -n "${PYTHON:-}" ]; then
  path=$(command -v "$PYTHON" 2>/dev/null) || {
    echo "PYTHON=$PYTHON names no program; give the path of a Python 3.11 or newer, or leave it out" >&2
    exit 1
  }
  ask "$path" ''
  echo "PYTHON=$PYTHON cannot be used:$refused" >&2
  exit 1
fi

for wanted; do
  candidates=$(
    { on_path "python$wanted"; kept "$wanted"; on_path python3; on_path python; } | awk '!seen[$0]++'
  )
  while IFS= read -r candidate; do
    ask "$candidate" "$wanted"
  done <<EOF
$candidates
EOF
done

{
  echo "No Python of $* that runs. Install one (Debian: python3-venv; or pyenv, or uv), or name one:"
  echo "  make PYTHON=/path/to/python3.13 ..."
  if [ -n "$refused" ]; then
    printf 'Found, and of no use:'
    printf '%s\n' "$refused" | awk '!seen[$0]++'
  fi
} >&2
exit 1
