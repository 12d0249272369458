# Sandboxes on a machine of the user's own, by its shell; `sandbox/machine` is the other side.
#
# All of a sandbox is in its directory: `about` (its labels), `env`, `end` (when it is ended, in seconds of this machine's clock),
# `pid` and `watcher` with their start times, and what was written in it. The watcher is the parent of all that runs in it: when
# the end has come, or the directory is gone, it kills the sandbox and removes the directory. Nothing of this runs as root.
#
# Needs coreutils and util-linux, and `ip`. Exit codes: 97 there is no such sandbox, 96 refused.

started() { read -r s 2>/dev/null <"/proc/$1/stat" || return 1; s=${s##*) }; set -- $s; echo "${20}"; }
refuse() { echo "$*" >&2; exit 96; }
runs() { [ -s "$1" ] && read -r p was <"$1" && [ "$(started "$p")" = "$was" ]; }
# What a sandbox wrote may be closed to its own user: root of a namespace of that user may remove it.
wipe() { unshare --user --map-root-user rm -rf -- "$@" 2>/dev/null || { chmod -R u+rwX -- "$@"; rm -rf -- "$@"; }; }
remove() { mv "$1" "$1.gone" 2>/dev/null && wipe "$1.gone"; }

# ID SECONDS ROOM IMAGE NETWORK; `about` and `env` are lines of stdin. The same id again finds what is there.
create() {
    d=$f/boxes/$1; IFS= read -r about; IFS= read -r env
    umask 077
    if mkdir "$d" 2>/dev/null; then
        printf %s "$env" >"$d/env"; echo $(($(date +%s)+$2+120)) >"$d/end"  # from when it is ready on
        printf %s "$about" >"$d/about.new"; mv "$d/about.new" "$d/about"
        setsid /bin/sh "$me" "$f" watch "$d" "$3" "$4" "$5" </dev/null >"$d/log" 2>&1 &
    fi
    n=0
    while [ ! -s "$d/ready" ] || [ ! -s "$d/pid" ]; do
        if [ ! -d "$d" ] || [ -e "$d/failed" ] || [ $n -gt 2400 ]; then
            why=$(tail -c 600 "$d/log" 2>/dev/null); remove "$d"; refuse "${why:-it did not start}"
        fi
        n=$((n+1)); sleep 0.05
    done
    keep "$1" "$2"
}

# DIRECTORY ROOM IMAGE NETWORK
watch() {
    d=$1; image=$3; network=$4; echo "$$ $(started $$)" >"$d/watcher"
    [ "$network" = none ] || : >"$d/network"  # it has the machine's
    umask 022; mkdir "$d/upper" "$d/work" "$d/root" || fail "no directory could be made in $d"
    "start_$2"
    echo "$u $(started $u)" >"$d/pid.new"; mv "$d/pid.new" "$d/pid"
    while kill -0 $u 2>/dev/null && [ -d "$d" ]; do
        left=$(($(cat "$d/end" 2>/dev/null || echo 0)-$(date +%s))); [ $left -gt 0 ] || break
        [ -s "$d/ready" ] && [ $left -ge 10 ] && left=10
        [ -s "$d/ready" ] || left=0.1
        sleep $left
    done
    [ -s "$d/ready" ] || : >"$d/failed"
    kill -9 $u 2>/dev/null; wait $u 2>/dev/null
    [ -e "$d/failed" ] || remove "$d"
}
fail() { echo "$*" >&2; : >"$d/failed"; exit 1; }

# IDS: says those that this call ended.
delete() {
    for id in "$@"; do
        d=$f/boxes/$id; [ -f "$d/about" ] && mv "$d" "$d.gone" 2>/dev/null || continue
        d=$d.gone; runs "$d/watcher" && kill -9 "$p"; runs "$d/pid" && kill -9 "$p"
        wipe "$d"; echo "$id"
    done
}

# [ID]: a line for each: its id, its end, when it was made, `about`, `env`.
list() {
    for d in "$f/boxes/"${1:-*}; do
        [ -f "$d/about" ] || continue
        case $d in *.gone) continue ;; esac
        if [ -f "$d/pid" ] && ! runs "$d/pid"; then remove "$d"; continue; fi
        echo "${d##*/} $(cat "$d/end") $(stat -c %Y "$d/env") $(cat "$d/about") $(cat "$d/env")"
    done
}

# ID SECONDS
keep() { d=$f/boxes/$1; runs "$d/pid" || exit 97; echo $(($(date +%s)+$2)) >"$d/end.new"; mv "$d/end.new" "$d/end"; }

# ID SCRIPT
enter() {
    d=$f/boxes/$1; runs "$d/pid" || exit 97
    enter_room /usr/bin/env -i /bin/sh -c "$2"
    c=$?; [ $c -ne 255 ] || c=254; exit $c  # 255 is the SSH client's own
}

# ID NAME: the files of a sandbox as an image, which opens on the same base.
keep_image() {
    d=$f/boxes/$1; runs "$d/pid" || exit 97; new=$f/images/$2.$$
    mkdir "$new" && unshare --user --map-root-user cp -a "$d/upper" "$new/upper" || { wipe "$new"; refuse "its files could not be copied"; }
    cat "$d/base" >"$new/base"; { echo "$f/images/$2/upper"; cat "$d/over"; } >"$new/over"
    [ -d "$f/images/$2" ] && wipe "$f/images/$2"; mv "$new" "$f/images/$2"
}
list_images() { for i in "$f"/images/*/base; do [ -f "$i" ] || continue; i=${i%/base}; echo "${i##*/}"; done; }
delete_image() { [ -d "$f/images/$1" ] && wipe "$f/images/$1"; true; }
# What an image means: `base`, and `over`, the uppers that lie on it, the topmost first.
find_image() {
    base=$image over=
    if [ -f "$f/images/$image/base" ]; then base=$(cat "$f/images/$image/base"); over=$(cat "$f/images/$image/over"); fi
    echo "$base" >"$d/base"; echo "$over" >"$d/over"
}

# Whether a sandbox can be had here at all.
check_namespaces() {
    for n in unshare nsenter mount umount pivot_root setsid base64; do
        command -v $n >/dev/null || refuse "there is no program $n: install util-linux and coreutils"
    done
    unshare --user --map-root-user true 2>/dev/null || refuse "an ordinary user may not make namespaces here: see sysctl user.max_user_namespaces and kernel.apparmor_restrict_unprivileged_userns"
}

# The sandbox: an overlay on the machine's own programs, or on a folder, in namespaces of an ordinary user.
start_namespaces() {
    find_image
    case $base in
    host|/*) start_room ;;
    *) fail "no image $image here: name a folder of this machine, or host" ;;
    esac
}
start_room() {
    of_host=
    if [ "$base" = host ]; then host_base; of_host=1
    elif [ ! -d "$base" ] || [ ! -r "$base" ]; then fail "no folder $base here that $(id -un) may read"; fi
    case $base$over$d in *[:,\ ]*) fail "a path with a colon, a comma or a space cannot be a part of an overlay: $base $d" ;; esac
    set -- --net; [ "$network" = none ] || shift
    unshare --user --map-root-user --mount --ipc --uts --pid "$@" --fork --kill-child \
        /bin/sh "$me" "$f" boot "$d" "$network" "$base" "$of_host" $over &
    u=$!
}
enter_room() {
    set -- --preserve-credentials -- "$@"; [ -f "$d/network" ] || set -- --net "$@"
    nsenter --target "$p" --user --mount --ipc --uts --pid="/proc/$p/ns/pid_for_children" "$@"
}
PLACES="usr bin sbin lib lib32 lib64 libx32 opt"
# The machine's own programs: its directories of programs, and of /etc what programs need to run.
host_base() {
    base=$f/host-$(stat -c %Y /etc/ld.so.cache 2>/dev/null || echo 0)
    [ -d "$base" ] && return
    b=$base.$$; mkdir -p "$b/dev" "$b/proc" "$b/sys" "$b/etc" "$b/root" "$b/tmp" "$b/home" "$b/var/tmp" "$b/run" "$b/srv" "$b/mnt"
    chmod 700 "$b/root"; chmod 1777 "$b/tmp" "$b/var/tmp"
    for n in $PLACES; do
        if [ -L /$n ]; then cp -a /$n "$b/$n"; elif [ -d /$n ]; then mkdir "$b/$n"; fi
    done
    for n in ld.so.cache ld.so.conf ld.so.conf.d nsswitch.conf localtime ssl ca-certificates pki crypto-policies \
        alternatives services protocols os-release debian_version mime.types profile bash.bashrc; do
        cp -a /etc/$n "$b/etc/" 2>/dev/null
    done
    printf 'root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n' >"$b/etc/passwd"
    printf 'root:x:0:\nnogroup:x:65534:\n' >"$b/etc/group"
    printf '127.0.0.1 localhost\n::1 localhost\n' >"$b/etc/hosts"; echo sandbox >"$b/etc/hostname"
    mv -T "$b" "$base" 2>/dev/null || wipe "$b"
}
# In the namespaces of a new sandbox, before its root is its own: DIRECTORY NETWORK BASE OF_HOST, then what lies over the base.
boot() {
    d=$1; network=$2; base=$3; of_host=$4; shift 4; r=$d/root
    if [ "$network" = none ]; then
        ip link set lo up || refuse "the loopback needs the program ip: install iproute2"
    fi
    layer root "$base" "$r" "$@"
    if [ -n "$of_host" ]; then
        for n in $PLACES; do [ -d /$n ] && [ ! -L /$n ] && layer $n /$n "$r/$n" "$@"; done
    fi
    mkdir -p "$r/proc" "$r/dev" "$r/tmp" "$r/sys" "$r/.before"
    mount -t proc proc "$r/proc" || refuse "a fresh /proc could not be mounted: this machine hides parts of its own"
    mount -t tmpfs -o mode=755,size=4m dev "$r/dev" || refuse "no /dev could be made"
    for n in null zero full random urandom tty; do : >"$r/dev/$n"; mount --bind /dev/$n "$r/dev/$n"; done
    mkdir "$r/dev/pts" "$r/dev/shm"; mount -t tmpfs -o mode=1777 shm "$r/dev/shm"
    mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts "$r/dev/pts"; ln -s pts/ptmx "$r/dev/ptmx"
    ln -s /proc/self/fd "$r/dev/fd"; ln -s fd/0 "$r/dev/stdin"; ln -s fd/1 "$r/dev/stdout"; ln -s fd/2 "$r/dev/stderr"
    if [ "$network" = host ]; then cat /etc/resolv.conf >"$r/etc/resolv.conf" 2>/dev/null; fi
    exec 3>"$d/ready"; cd / && pivot_root "$r" "$r/.before" && cd / || refuse "the root could not be changed"
    umount -l /.before || refuse "the image has no umount, which leaves the machine's own files behind"
    rmdir /.before; echo ready >&3; exec 3>&- </dev/null >/dev/null 2>&1
    while :; do sleep 3600 & wait $!; done
}
# The same sandbox on an image that Apptainer reads.
check_apptainer() {
    command -v apptainer >/dev/null || refuse "there is no program apptainer here"
    check_namespaces
}
start_apptainer() {
    find_image
    case $base in
    host) ;;
    /*) [ -r "$base" ] || fail "no file or folder $base here that $(id -un) may read" ;;
    esac
    [ "$base" = host ] || [ -d "$base" ] || unpack
    start_room
}
# Any image that Apptainer reads becomes a folder, once for each file or name.
unpack() {
    case $base in *://*|docker-archive:*|oci-archive:*|/*) from=$base ;; *) from=docker://$base ;; esac
    key=$(printf '%s %s' "$from" "$(stat -c '%Y %s' "${from#*:}" "$base" 2>/dev/null)" | sha256sum | cut -c1-20)
    base=$f/unpacked-$key
    if [ ! -d "$base" ]; then
        apptainer -q build --fakeroot --sandbox "$base.$$" "$from" || { wipe "$base.$$"; fail "Apptainer made no image of $image"; }
        mv -T "$base.$$" "$base" 2>/dev/null || wipe "$base.$$"
    fi
}

# NAME FROM TO, then what lies over it.
layer() {
    n=$1 from=$2 to=$3 low=; shift 3
    for o in "$@"; do [ -d "$o/$n" ] && low="$low$o/$n:"; done
    mkdir -p "$d/upper/$n" "$d/work/$n"
    mount -t overlay overlay -o "lowerdir=$low$from,upperdir=$d/upper/$n,workdir=$d/work/$n,userxattr" "$to" ||
        refuse "an ordinary user may not mount an overlay of $from: that needs Linux 5.11, and the folder on a disk of this machine"
}

PATH=$PATH:/usr/sbin:/sbin; me=$0; f=$1; shift
"$@"
