# Sourced by the scripts in this folder, which define `fail`: installs what is missing with the system's package
# manager.

# install NEEDED APT DNF APK BREW: a description of what is needed, and its package for each package manager.
install() {
    local needed=$1 as_root=()
    if [ "$(id -u)" -ne 0 ] && command -v apt-get dnf apk >/dev/null; then
        command -v sudo >/dev/null || fail "expected $needed: install it, or run this as root"
        as_root=(sudo)
    fi
    if command -v apt-get >/dev/null; then
        "${as_root[@]}" apt-get update -qq
        # The package must not start its server: tests start their own.
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq "$2" >/dev/null
    elif command -v dnf >/dev/null; then
        "${as_root[@]}" dnf install -y -q "$3"
    elif command -v apk >/dev/null; then
        "${as_root[@]}" apk add -q "$4"
    elif command -v brew >/dev/null; then
        brew install -q "$5"
    else
        fail "expected $needed, and know no package manager here: install it"
    fi
}
