#!/usr/bin/env bash
# A SLURM cluster of one node for the tests: this machine. As root; it changes nothing outside of its folder.
#   tests/slurm_cluster.sh install   the Debian packages, where apt-get and root are there
#   tests/slurm_cluster.sh start     prints the line that makes a shell use it
#   tests/slurm_cluster.sh kick      jobs that SLURM holds back after a requeue start after ten seconds, not two minutes
#   tests/slurm_cluster.sh stop      cancels the jobs and ends what start began
# The folder is $FOCUS_EXP_SLURM (default: focus_exp-slurm in the folder for temporary files), short enough for a socket.
set -euo pipefail

state=${FOCUS_EXP_SLURM:-${TMPDIR:-/tmp}/focus_exp-slurm}
daemons=(slurmd slurmctld munged) # in the order in which they stop
export SLURM_CONF=$state/slurm.conf

fail() {
  echo "slurm_cluster.sh: $*" >&2
  exit 1
}

impossible() { # here, and no fault of anyone
  echo "$*" >&2
  exit 3
}

installed() { command -v slurmctld slurmd munged >/dev/null; }

running() { [ -s "$state/$1.pid" ] && kill -0 "$(cat "$state/$1.pid")" 2>/dev/null; }

install() {
  installed && return
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || impossible "SLURM is not installed; root can, with apt-get"
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends slurm-wlm munge \
    >/dev/null || impossible "SLURM is not installed, and apt-get does not get slurm-wlm and munge"
}

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

# no accounting, no cgroups, no systemd; more processors than there are, so that jobs run side by side anywhere
configure() {
  local node memory
  node=$(hostname -s)
  memory=$(awk '/MemTotal/ {print int($2 / 1024 * 0.9)}' /proc/meminfo)
  mkdir -p "$state/controller" "$state/node"
  [ -s "$state/munge.key" ] || (umask 077 && head -c 1024 /dev/urandom >"$state/munge.key")
  cat >"$SLURM_CONF" <<EOF
ClusterName=focus_exp
SlurmctldHost=$node(127.0.0.1)
SlurmctldPort=$(free_port)
SlurmdPort=$(free_port)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$state/munge.socket
StateSaveLocation=$state/controller
SlurmdSpoolDir=$state/node
SlurmctldPidFile=$state/slurmctld.pid
SlurmdPidFile=$state/slurmd.pid
SlurmctldLogFile=$state/slurmctld.log
SlurmdLogFile=$state/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
ReturnToService=2
JobRequeue=1
KillWait=5
NodeName=$node NodeAddr=127.0.0.1 CPUs=8 RealMemory=$memory State=UNKNOWN
PartitionName=test Nodes=$node Default=YES MaxTime=INFINITE State=UP
EOF
}

# submitit asks sacct, which needs accounting, whether a job is still there: without it, it waits forever for killed jobs
stand_in_for_sacct() {
  mkdir -p "$state/bin"
  cat >"$state/bin/sacct" <<'EOF'
#!/usr/bin/env bash
# sacct -o JobID,State,NodeList --parsable2 -j ID [-j ID ...]
echo "JobID|State|NodeList"
while [ $# -gt 0 ]; do
  if [ "$1" = -j ]; then
    scontrol --oneliner show job "${2%%_*}" 2>/dev/null | awk '{
      for (i = 1; i <= NF; i++) { split($i, pair, "="); field[pair[1]] = pair[2] }
      id = ("ArrayJobId" in field) ? field["ArrayJobId"] "_" field["ArrayTaskId"] : field["JobId"]
      print id "|" field["JobState"] "|" field["NodeList"]
      delete field
    }'
    shift
  fi
  shift
done
EOF
  chmod +x "$state/bin/sacct"
}

start() {
  installed || impossible "SLURM is not installed: tests/slurm_cluster.sh install"
  [ "$(id -u)" = 0 ] || impossible "SLURM's daemons want to be started by root"
  mkdir -p "$state" && chmod 755 "$state"
  running slurmctld || configure
  stand_in_for_sacct
  running munged || munged --force --key-file="$state/munge.key" --socket="$state/munge.socket" \
    --pid-file="$state/munged.pid" --log-file="$state/munged.log" --seed-file="$state/munge.seed"
  running slurmctld || slurmctld
  running slurmd || slurmd -N "$(hostname -s)"
  for _ in $(seq 100); do
    if sinfo --noheader --format=%t 2>/dev/null | grep -qE 'idle|mix|alloc'; then
      echo "export SLURM_CONF=$SLURM_CONF PATH=$state/bin:\$PATH"
      return
    fi
    sleep 0.2
  done
  tail -n 5 "$state"/slurm*.log >&2
  fail "the node does not come up"
}

# a job that starts in the second in which its last life was killed is taken for the killed one, and fails
kick() {
  squeue --noheader --states=PENDING --format='%i %r %S' | while read -r job reason begin; do
    if [ "$reason" = BeginTime ] && [ $(($(date --date="$begin" +%s) - $(date +%s))) -lt 110 ]; then
      scontrol update jobid="$job" StartTime=now
    fi
  done
}

stop() {
  running slurmctld && scancel --quiet --user="$(id -un)" || true
  for daemon in "${daemons[@]}"; do
    if running "$daemon"; then
      pid=$(cat "$state/$daemon.pid")
      kill "$pid"
      while kill -0 "$pid" 2>/dev/null; do sleep 0.1; done
    fi
  done
  rm -rf "$state"
}

case ${1:-} in
  install | start | kick | stop) "$1" ;;
  *) sed -n '2,7s/^# //p' "$0" && exit 2 ;;
esac
