# Sourced by tools/demo and tools/test: a virtual environment with the pinned torch and this package built into it.
# Both scripts share it (.venv, or $FLASHSDPA_VENV); a second run reuses everything and only rebuilds what changed.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
venv="${FLASHSDPA_VENV:-$root/.venv}"
python="$venv/bin/python"

for tool in python3 g++; do
  command -v "$tool" >/dev/null || { echo "$tool is missing; on Debian: apt-get install python3-venv g++" >&2; exit 1; }
done
if [[ ! -x "$python" ]]; then
  python3 -m venv "$venv" || { echo "python3 cannot make a virtual environment; on Debian: apt-get install python3-venv" >&2; exit 1; }
fi

# prepare EXTRA...: what this run needs, then the package with the CMake build folder kept in build/.
prepare() {
  "$python" -m pip install --quiet --disable-pip-version-check \
    torch==2.13.0 numpy cmake ninja "scikit-build-core>=0.10" pybind11 "$@"
  PATH="$venv/bin:$PATH" "$python" -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps \
    --config-settings=build-dir="$root/build/{wheel_tag}" .
}
