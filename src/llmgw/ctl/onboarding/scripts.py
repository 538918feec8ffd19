"""What runs on the node: POSIX shell, each script one step that can be cut anywhere and run again."""

# Arguments: file name, its sha256, interpreter, `receive` or `keep`. The file comes by standard input.
INSTALL = r"""
set -eu
umask 022
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
name=$1 sha256=$2 python=$3 receive=$4
lib=/usr/local/lib/llmgw
part="$lib/.$name.part"
if command -v flock >/dev/null; then
    exec 9>/run/llmgw-install.lock
    flock -w 60 9 || { echo 'another installation of llmgw is under way' >&2; exit 66; }
fi
clean() { rm -f "$part"; rmdir "$lib/unpacked" "$lib/plugins" "$lib" 2>/dev/null || :; }
trap clean EXIT
trap 'exit 1' HUP INT TERM PIPE
mkdir -p "$lib"
if [ "$receive" = receive ]; then
    cat >"$part"
    got=$(sha256sum <"$part")
    if [ "${got%% *}" != "$sha256" ]; then
        echo "what arrived has sha256 ${got%% *}, expected $sha256" >&2
        exit 65
    fi
    chmod 755 "$part"
    sync "$part" 2>/dev/null || sync
    mv -f "$part" "$lib/$name"
fi
mkdir -p "$lib/unpacked" "$lib/plugins"
SHIV_ROOT="$lib/unpacked" "$python" -IS "$lib/$name" --version
before=$(readlink "$lib/current" 2>/dev/null || :)
if [ "$before" != "$name" ]; then
    if [ -n "$before" ] && [ -e "$lib/$before" ]; then
        ln -sfn "$before" "$lib/.previous" && mv -Tf "$lib/.previous" "$lib/previous"
    fi
    ln -sfn "$name" "$lib/.current" && mv -Tf "$lib/.current" "$lib/current"
fi
wrapper=$(printf '#!/bin/sh\nexec %s -IS %s/current "$@"' "$python" "$lib")
if [ "$(cat /usr/local/bin/llmgw 2>/dev/null || :)" != "$wrapper" ]; then
    mkdir -p /usr/local/bin
    printf '%s\n' "$wrapper" >/usr/local/bin/.llmgw.new
    chmod 755 /usr/local/bin/.llmgw.new
    mv -f /usr/local/bin/.llmgw.new /usr/local/bin/llmgw
fi
"""

# agent.yaml by standard input. One that a person has edited since is left alone, unless the argument is `replace`.
CONFIGURE = r"""
set -eu
umask 077
etc=/etc/llmgw
mkdir -p -m 755 "$etc"
cd "$etc"
trap 'rm -f .agent.yaml.new' EXIT
trap 'exit 1' HUP INT TERM PIPE
cat >.agent.yaml.new
new=$(sha256sum <.agent.yaml.new) new=${new%% *}
[ "$new" = "$2" ] || { echo 'the file did not arrive whole' >&2; exit 65; }
/usr/local/bin/llmgw agent -c "$etc/.agent.yaml.new" --check >/dev/null
if [ -e agent.yaml ]; then
    old=$(sha256sum <agent.yaml) old=${old%% *}
    if [ "$old" = "$new" ]; then
        printf '%s\n' "$new" >.agent.yaml.sha256
        echo same
        exit 0
    fi
    if [ "$1" != replace ] && [ "$old" != "$(cat .agent.yaml.sha256 2>/dev/null || :)" ]; then
        echo edited
        exit 0
    fi
fi
mv -f .agent.yaml.new agent.yaml
printf '%s\n' "$new" >.agent.yaml.sha256
echo written
"""

CERTIFICATE = 'exec /usr/local/bin/llmgw agent certificate --node "$1"'

SERVICE = "exec /usr/local/bin/llmgw agent install-service --start"

# What an upgrade asks before it begins, and after: the file that is current and the one before it.
STANDING = r"""
lib=/usr/local/lib/llmgw
readlink "$lib/current" || :
readlink "$lib/previous" || :
"""

# Argument: the file to go back to.
ROLL_BACK = r"""
set -eu
lib=/usr/local/lib/llmgw
[ -e "$lib/$1" ]
failed=$(readlink "$lib/current" || :)
if [ "$failed" != "$1" ]; then
    ln -sfn "$1" "$lib/.current" && mv -Tf "$lib/.current" "$lib/current"
fi
rm -f "$lib/previous"
exec /usr/local/bin/llmgw agent install-service --start
"""

TIDY = "exec /usr/local/bin/llmgw agent tidy"

# Argument: `purge` removes engines and weights too.
REMOVE = r"""
set -eu
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
if [ -x /usr/local/bin/llmgw ] && [ -e /etc/llmgw/agent.yaml ]; then
    /usr/local/bin/llmgw agent remove-service
fi
cd /
rm -rf /etc/llmgw/agent.yaml /etc/llmgw/.agent.yaml.sha256 /etc/llmgw/agent.pem /etc/llmgw/agent-key.pem \
    /etc/llmgw/ca.pem /var/lib/llmgw-agent /var/log/llmgw-agent.log
rmdir /etc/llmgw 2>/dev/null || :
[ "$1" != purge ] || { rm -rf /var/lib/llmgw-weights /opt/llmgw/engines; rmdir /opt/llmgw 2>/dev/null || :; }
rm -rf /usr/local/bin/llmgw /usr/local/lib/llmgw /run/llmgw-install.lock
"""
