# Sourced by the scripts that the README names: makes .venv when it is missing or out of date, and activates it.
#
#   install_env NAME REQUIREMENT...    NAME tells the stamps of several sets of requirements apart
#
# The second time it only compares a hash, so the scripts start at once.

install_env() {
    local name=$1
    shift
    local python=${PYTHON:-python3}
    if [ ! -x .venv/bin/python ]; then
        echo "making .venv (first time: torch and friends, a few minutes)" >&2
        "$python" -m venv .venv
    fi
    # shellcheck disable=SC1091
    . .venv/bin/activate
    local stamp=.venv/.installed-$name
    local hash
    hash=$(python -c 'import hashlib, sys
text = open("pyproject.toml", "rb").read() + " ".join(sys.argv[1:]).encode()
print(hashlib.sha256(text).hexdigest())' "$@")
    if [ "$(cat "$stamp" 2>/dev/null)" != "$hash" ]; then
        echo "installing $*" >&2
        python -m pip install --quiet --disable-pip-version-check "$@"
        echo "$hash" >"$stamp"
    fi
}
