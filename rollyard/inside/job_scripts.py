"""The shell scripts of durable jobs, as they run in a sandbox; `sandbox/job_shim.py` is the host's side.

A job's directory holds `out`, `err`, `pid` (with the process's start time, since pids come back) and, once it ended, `exit`,
which appears by rename and so is never half written. `mkdir` of the directory is the launch guard: a launch that is repeated
because its answer was lost starts nothing twice.

A program may leave its process group and session, so killing goes by a variable that every descendant inherits. Needs /bin/sh,
cat, tail, head, grep, sleep and /proc in the sandbox; `setsid` where present.
"""

MARK = "ROLLYARD_JOB"

START_TIME = "started() { read -r s 2>/dev/null </proc/$1/stat || return 1; s=${s##*) }; set -- $s; echo ${20}; }\n"
RUN = (
    'echo "$$ $(started $$)" >"$d/pid.new"; mv "$d/pid.new" "$d/pid"; '
    '"$@" >"$d/out" 2>"$d/err"; c=$?; echo $c >"$d/exit.new"; mv "$d/exit.new" "$d/exit"\n'
)
WRAP = START_TIME + "d=$1; shift; " + RUN
CLAIM = 'mkdir "$d" 2>/dev/null || { [ -d "$d" ] && exit 0; exit 73; }\n: >"$d/out"; : >"$d/err"\n'
MAKE = 'd=$1; wrap=$2; shift 2\nmkdir -p "${d%/*}" && chmod 1777 "${d%/*}" 2>/dev/null\n' + CLAIM
LAUNCH = (
    MAKE
    + """if command -v setsid >/dev/null 2>&1; then setsid sh -c "$wrap" job "$d" "$@" </dev/null >/dev/null 2>&1 &
else sh -c "$wrap" job "$d" "$@" </dev/null >/dev/null 2>&1 & fi
n=0; while [ ! -f "$d/pid" ] && [ $n -lt 200 ]; do n=$((n+1)); sleep 0.02; done
"""
)
ATTACH = MAKE + 'exec sh -c "$wrap" job "$d" "$@"'
STATE = (
    START_TIME
    + """state() {
  [ -d "$1" ] || { echo unknown; return; }
  [ -f "$1/exit" ] && { read -r code <"$1/exit"; echo "exit $code"; return; }
  [ -f "$1/pid" ] || { echo starting; return; }
  read -r pid was <"$1/pid"
  [ "$(started "$pid")" = "$was" ] && { echo running; return; }
  [ -f "$1/exit" ] && { read -r code <"$1/exit"; echo "exit $code"; return; }
  echo lost
}
over() { [ -f "$1/exit" ] || { n=$((n+1)); [ $((n % 20)) -eq 0 ] && case $(state "$1") in lost|unknown) ;; *) false ;; esac; }; }
"""
)
LOOK = STATE + 'state "$1"\n'
# The two long polls: they stand still inside the sandbox until there is something to say, but not for ever.
AWAIT = STATE + 'n=0; while [ $n -lt $2 ] && ! over "$1"; do sleep 0.05; done; state "$1"\n'
FOLLOW = (
    STATE
    + 'n=0; while [ $n -lt $5 ] && [ "$(wc -c <"$1/$2")" -le $3 ] && ! over "$1"; do sleep 0.05; done; '
    + 'tail -c +$(($3+1)) "$1/$2" | head -c $4'
)
# For a caller that wants the end and the output at once: as few calls as possible, each of them short and safe to repeat.
TELL = (
    STATE
    + """tell() { s=$(state "$1"); o=$(($(wc -c <"$1/out"))); e=$(($(wc -c <"$1/err")))
  case $s in exit*|lost) ;; *) [ "$3" = 1 ] || o=0 e=0 ;; esac
  echo "$s $o $e"; [ $o -gt $2 ] && o=$2; [ $e -gt $2 ] && e=$2
  [ $o = 0 ] || head -c $o "$1/out"; [ $e = 0 ] || head -c $e "$1/err"
}
wait_until_over() { n=0; while [ $n -lt $2 ] && ! over "$1"; do if [ $n -lt 20 ]; then sleep 0.01; else sleep 0.05; fi; done; }
"""
)
FINISH = "most=$1; polls=$2; shift 2\n" + LAUNCH + TELL + 'wait_until_over "$d" "$polls"; tell "$d" "$most" 0\n'
FINISH_HERE = "most=$1; d=$2; shift 2; exec </dev/null\n" + TELL + CLAIM + RUN + 'tell "$d" "$most" 0\n'
END = TELL + '[ -d "$1" ] || exit 74; wait_until_over "$1" "$3"; tell "$1" "$2" "$4"\n'

FIND = (
    f'mine() {{ grep -l "{MARK}=$1" /proc/[0-9]*/environ 2>/dev/null'
    " | while IFS=/ read -r _ _ p _; do echo $p; done; }\n"
)
KILL = (
    FIND
    + """d=$1; id=${d##*/}; n=0
while [ $n -lt 100 ]; do
  pids=$(mine "$id"); [ -z "$pids" ] && break
  kill -9 $pids 2>/dev/null; n=$((n+1)); sleep 0.02
done
"""
)
KILL_ALL = f"""n=0; while [ $n -lt 100 ]; do
pids=$(grep -l "{MARK}=" /proc/[0-9]*/environ 2>/dev/null | while IFS=/ read -r _ _ p _; do echo $p; done)
[ -z "$pids" ] && exit 0; kill -9 $pids 2>/dev/null; n=$((n+1)); sleep 0.02; done"""
CPU = FIND + 'for p in $(mine "${1##*/}"); do cat /proc/$p/stat 2>/dev/null; done\n'
