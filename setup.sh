#!/usr/bin/env bash
# Sets SimpleLLM up in .venv; then, if asked, runs the demo or the tests, or downloads a model. Checks everything
# before it makes anything. Run again after any failure: it goes on where it stopped.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: ./setup.sh                      set up only: a venv in .venv with all that SimpleLLM needs
       ./setup.sh demo                 set up, then generate from the built-in tiny checkpoint
       ./setup.sh test [PYTEST ARGS]   set up with what the tests need, then run them
       ./setup.sh PATH/gpt-oss-20b     set up, then download that model into PATH (or PATH/gpt-oss-120b)
       ./setup.sh --dry-run [...]      say what would be chosen, and do nothing

environment: PYTHON       the Python to use, 3.11 to 3.13
             TORCH_INDEX  in place of https://download.pytorch.org/whl
             HF_ENDPOINT  in place of https://huggingface.co
pip's own settings (pip.conf, PIP_*) are honoured.
TEXT
}

CPU_TORCH=2.13.0
GPU_TORCH=2.11.0 # with triton 3.6.0: the pair that the kernels are built on
TORCH_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl}
HF_ENDPOINT=${HF_ENDPOINT:-https://huggingface.co}
export PIP_DISABLE_PIP_VERSION_CHECK=1

from=$PWD # a model's path is relative to where the user stands
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mark=.venv/simplellm-venv   # says that this script made the venv, where, and with which Python
stamp=.venv/simplellm-stamp # says what is completely installed
pip_log=.venv/pip.log       # what pip said on stderr: shown where it matters

say() { printf '%s\n' "$*"; }
warn() { printf 'setup.sh: %s\n' "$*" >&2; }
die() { warn "$@"; exit 1; }

# --- what is asked -----------------------------------------------------------------------------------------------

job="" model="" extras=server dry="" args=()

parse() {
  while (($#)); do
    case $1 in
      -h | --help) usage; exit 0 ;;
      --dry-run) dry=yes ;;
      *)
        if [[ $job == test ]]; then args+=("$1")
        elif [[ -n $job ]]; then die "unknown argument '$1' after '$job'; see ./setup.sh --help"
        elif [[ $1 == demo || $1 == test ]]; then job=$1
        elif [[ $(basename -- "$1") =~ ^gpt-oss-(20b|120b)$ ]]; then job=download model=${1%/}
        else die "unknown argument '$1'; see ./setup.sh --help"
        fi ;;
    esac
    shift
  done
  [[ $job != download || $model == /* ]] || model=$from/$model
  [[ $job != test ]] || extras="test"
}

# --- which Python ------------------------------------------------------------------------------------------------

python="" version="" minor="" base="" has_venv="" has_header=""

# Fills the variables above from the interpreter $1; fails where it does not run or is not 3.11 to 3.13.
inspect() {
  local answer
  answer=$("$1" - 2>/dev/null <<'PYTHON'
import importlib.util, os, sys, sysconfig
print(*sys.version_info[:3], sep=".")
print(sys.base_prefix)
print("yes" if all(map(importlib.util.find_spec, ("venv", "ensurepip"))) else "no")
print("yes" if os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")) else "no")
PYTHON
  ) || return 1
  { read -r version && read -r base && read -r has_venv && read -r has_header; } <<<"$answer" || return 1
  minor=${version%.*}
  [[ $minor =~ ^3\.1[123]$ ]]
}

our_venv() { [[ -f $mark && $(head -n 1 "$mark") == "$root" ]] && .venv/bin/python -m pip --version >/dev/null 2>&1; }

choose_python() {
  local candidate
  if [[ -n ${PYTHON:-} ]]; then
    python=$PYTHON
    inspect "$python" || die "PYTHON=$PYTHON does not run, or is not Python 3.11 to 3.13"
    return
  fi
  python=.venv/bin/python
  if our_venv && inspect "$python"; then return; fi
  for candidate in python3.12 python3.11 python3.13 python3; do
    python=$(command -v "$candidate") || continue
    if [[ $python != "$root"/.venv/* ]] && inspect "$python"; then return; fi
  done
  for candidate in 3.12 3.11 3.13 3; do
    if apt-cache show "python$candidate-venv" >/dev/null 2>&1; then break; fi
  done
  die "no Python 3.11 to 3.13 here. Install one, or name one in PYTHON:
  $(apt_line "python$candidate" "python$candidate-venv")"
}

# --- which torch -------------------------------------------------------------------------------------------------

build=cpu why="" notes=()

choose_torch() {
  local gpus name driver cap major
  if ! command -v nvidia-smi >/dev/null; then why="no NVIDIA GPU found"; return; fi
  gpus=$(timeout 30 nvidia-smi --query-gpu=name,driver_version,compute_cap --format=csv,noheader 2>/dev/null) || gpus=""
  if [[ ! $gpus =~ ,\ *[0-9]+\. ]]; then why="nvidia-smi is here, but lists no GPU"; return; fi
  name=$(grep -m 1 ', *9\.[0-9]*$' <<<"$gpus") || name=$(head -n 1 <<<"$gpus") # a Hopper card, if there is one
  IFS=, read -r name driver cap <<<"$name"
  driver=${driver// /} cap=${cap// /} major=${driver%%.*}
  why="$name, driver $driver"
  if ((major >= 580)); then build=cu130
  elif ((major >= 570)); then build=cu128
  else notes+=("driver $driver is too old for torch $GPU_TORCH: SimpleLLM will run on the CPU, without its GPU kernels." \
               "With driver 570 or later (580 for CUDA 13), run setup.sh again.")
  fi
  [[ $cap == 9.* ]] || notes+=("$name (compute capability $cap) is not a Hopper GPU: the kernels will not run on it;" \
                               "the torch twins do their work, far slower.")
  if [[ $build != cpu && $extras == server ]]; then extras=gpu,server; fi
}

print_choice() {
  say "python   $python ($version)"
  if [[ $build == cpu ]]; then say "torch    $CPU_TORCH, CPU build: $why"
  else say "torch    $GPU_TORCH with triton 3.6.0, CUDA ${build:2:2}.${build:4}: $why"
  fi
  say "from     the first that has it: your pip indexes, $TORCH_INDEX/$build$(
    case $build in cpu) say ", PyPI (torch $GPU_TORCH, about 3 GB)" ;; cu130) say ", PyPI" ;; esac)"
  say "extras   $extras"
  say "then     ${job:-nothing more}${model:+ openai/$(basename "$model") to $model}"
  ((${#notes[@]} == 0)) || printf 'note     %s\n' "${notes[@]}"
}

# --- what the system lacks ---------------------------------------------------------------------------------------

apt_line() {
  local sudo=""
  ((EUID == 0)) || sudo="sudo "
  say "${sudo}apt-get update && ${sudo}apt-get install -y $*"
}

check_system() {
  local lacks=() packages=()
  if [[ $python != .venv/bin/python && $has_venv == no ]]; then
    lacks+=("Python's venv module") packages+=("python$minor-venv")
  fi
  if [[ $extras != server ]]; then # Triton compiles a launcher for each kernel
    if ! command -v "${CC:-gcc}" >/dev/null && ! command -v clang >/dev/null; then
      lacks+=("a C compiler") packages+=(gcc libc6-dev)
    fi
    if [[ $has_header == no ]]; then lacks+=("Python.h") packages+=("python$minor-dev"); fi
  fi
  ((${#lacks[@]} == 0)) || die "missing: $(IFS=, && say "${lacks[*]}"). Nothing has been done; install with
  $(apt_line "${packages[@]}")"
}

# --- installing --------------------------------------------------------------------------------------------------

make_venv() {
  local want=$root$'\n'"$minor $base"
  [[ $python != .venv/bin/python ]] || return 0
  if [[ -e .venv || -L .venv ]]; then
    [[ -f $mark ]] || die "$root/.venv was not made by setup.sh: move it away and run again"
    if our_venv && [[ $(<"$mark") == "$want" ]]; then return; fi
    say "making .venv anew: it is for another Python or place, or was left unfinished"
    rm -rf .venv
  fi
  trap 'rm -rf .venv' EXIT
  mkdir .venv
  say "$want" >"$mark"
  "$python" -m venv .venv || die "$python could not make a venv (message above); .venv has been removed"
  trap - EXIT
}

# pip install; 0: done, 1: no index has it. Any other failure ends the script, ready to be run again.
try_pip() {
  if .venv/bin/python -m pip install "$@" 2>$pip_log; then return 0; fi
  # The second is what pip says where a constraints file speaks of torch, too.
  if grep -Eq "No matching distribution found for torch|ResolutionImpossible" $pip_log; then return 1; fi
  pip_failed "pip failed (message above)"
}

pip_failed() {
  cat $pip_log >&2
  die "$1. What it had installed is kept: run the same command again to go on"
}

answers() {
  timeout 10 .venv/bin/python -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=5)' "$1" 2>/dev/null
}

install_torch() {
  local torch=$CPU_TORCH index=$TORCH_INDEX/$build
  [[ $build == cpu ]] || torch=$GPU_TORCH
  say "torch $torch+$build: asking your pip indexes"
  if try_pip "torch==$torch+$build"; then return; fi
  say "they do not have it: asking $index"
  if answers "$index/torch/" && try_pip --index-url "$index" "torch==$torch+$build"; then return; fi
  case $build in
    cu128) die "$index has no torch for this Python, or does not answer, and PyPI's needs driver 580" ;;
    cpu) warn "$index does not have it either, or does not answer: taking PyPI's torch $GPU_TORCH, about 3 GB" ;;
  esac
  try_pip "torch==$GPU_TORCH" || pip_failed "no index has torch for this Python, or none can be reached"
}

install() {
  local key; key="$(cksum <pyproject.toml) $build"
  if [[ -f $stamp && $(head -n 1 "$stamp") != "$key" ]]; then rm "$stamp"; fi
  if [[ -f $stamp ]] && grep -qx "extras:$extras" "$stamp"; then return; fi
  [[ -f $stamp ]] || install_torch
  try_pip --editable ".[$extras]" || pip_failed "pip found no set of packages that fits"
  [[ -f $stamp ]] || say "$key" >"$stamp"
  printf 'extras:%s\n' server "$extras" >>"$stamp" # whatever the extras, the server's are among them
}

download() {
  local repo; repo=openai/$(basename "$model")
  say "downloading $repo to $model"
  if .venv/bin/hf download "$repo" --local-dir "$model" --exclude "original/*" --exclude "metal/*"; then
    say "done: .venv/bin/simplellm info $model"
    return
  fi
  answers "$HF_ENDPOINT/api/models/$repo" || warn "the hub at $HF_ENDPOINT cannot be reached: is the network up?"
  if [[ -d $model ]]; then warn "the download is not complete; what came is kept in $model"; fi
  die "not downloaded. Run the same command again to go on"
}

main() {
  parse "$@"
  cd "$root"
  choose_python
  choose_torch
  print_choice
  check_system
  [[ -z $dry ]] || return 0
  make_venv
  install
  case $job in
    demo) exec .venv/bin/python -m simplellm demo ;;
    test) exec .venv/bin/python -m pytest -n auto --dist loadfile "${args[@]}" ;; # a process per core
    download) download ;;
    *) say "ready: source $root/.venv/bin/activate" ;;
  esac
}

main "$@"
