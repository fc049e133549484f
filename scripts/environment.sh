# Sourced by ./demo, ./test, ./lint and .ci/run: finds a Python >= 3.11 and makes the environment the tools run in.
# It asks for nothing but bash and Python, so that a fresh clone works on a fresh machine.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() {
    echo "error: $*" >&2
    exit 1
}

# Prints "3.13 /path/to/python" when $1 is a Python that is new enough. Running it is the only safe question: a shim
# on the PATH may stand for a version that isn't there.
describe_python() {
    command -v "$1" >/dev/null && "$1" -c '
import sys
if sys.version_info < (3, 11): sys.exit(1)
print("%d.%d" % sys.version_info[:2], sys.executable)' 2>/dev/null
}

# One line for each usable Python, oldest first.
list_pythons() {
    local candidate
    for candidate in python3 python3.{11..19} "${HOME:-}"/.pyenv/versions/3.*/bin/python; do
        describe_python "$candidate" || true
    done | sort -s -t . -k 2,2n
}

newest_version() { list_pythons | tail -n 1 | cut -d ' ' -f 1; }

# $1 or $PYTHON may be a path, a command or a bare version such as 3.13.
choose_python() {
    local wanted=${1:-${PYTHON:-}} found
    if [[ $wanted =~ ^3\.[0-9]+$ ]]; then
        found=$(list_pythons | grep -m 1 "^$wanted ") || fail "no Python $wanted on the PATH or in ~/.pyenv/versions"
    elif [[ $wanted ]]; then
        found=$(describe_python "$wanted") || fail "$wanted is no Python >= 3.11"
    else
        found=$(describe_python python3) || found=$(list_pythons | tail -n 1)
    fi
    [[ $found ]] || fail "effectonce needs Python >= 3.11; put one on the PATH or name it: PYTHON=/path/to/python"
    echo "${found#* }"
}

# Debian ships Python without ensurepip; python3-venv brings it.
make_venv() {
    local python=$1 directory=$2 package
    "$python" -c 'import ensurepip, venv' 2>/dev/null || {
        package="python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"
        command -v apt-get >/dev/null || fail "$python can't make virtual environments: it has no ensurepip"
        [[ $(id -u) = 0 ]] || fail "$python can't make virtual environments; first run: sudo apt-get install $package"
        echo "installing $package ..." >&2
        { apt-get -q update && DEBIAN_FRONTEND=noninteractive apt-get -qy install --no-install-recommends "$package"; } \
            >&2 || fail "could not install $package"
    }
    rm -rf "$directory"
    "$python" -m venv "$directory" >&2 || fail "could not make $directory"
}

# Prints the directory of an environment that holds exactly what uv.lock says, for the Python $1. The stamp names
# everything the environment was made from, its own place included, so a changed lock or a moved tree makes it anew.
ensure_environment() {
    local python=$1 version directory stamp
    version=$("$python" -c 'import platform; print(platform.python_version())')
    directory="$root/.venvs/$version"
    mkdir -p "$root/.venvs"
    exec 9>"$root/.venvs/lock"
    if command -v flock >/dev/null; then flock 9; fi  # ./lint beside ./test makes it once
    stamp=$({ echo "$directory"; cat "$root/pyproject.toml" "$root/uv.lock" "${BASH_SOURCE[0]}"; } | cksum)
    if ! { [[ $(cat "$directory/stamp" 2>/dev/null) = "$stamp" ]] && "$directory/bin/python" -c ''; } 2>/dev/null; then
        echo "making the environment for Python $version ..." >&2
        make_venv "$python" "$directory"
        install_locked "$directory"
        echo "$stamp" >"$directory/stamp"
    fi
    echo "$directory"
}

# uv only reads the lock. pip installs, because pip knows a machine's own mirror and certificates.
install_locked() {
    local python="$1/bin/python" requirements="$1/requirements.txt"
    local pip=("$python" -m pip --quiet --disable-pip-version-check install)
    {
        "${pip[@]}" 'uv>=0.9' &&
            "$python" -m uv export --project "$root" --quiet --frozen --offline --no-emit-project \
                --output-file "$requirements" &&
            "${pip[@]}" --require-hashes --no-deps --requirement "$requirements" &&
            "${pip[@]}" --no-build-isolation --no-deps --editable "$root"
    } >&2 || fail "could not install the development tools"
}
