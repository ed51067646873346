#!/usr/bin/env bash
# Resolve the package with all its extras as pip does without any configuration, for each Python that is here (or those
# named). Nothing is installed. flash is left out: it is built from source, with a CUDA toolkit.
set -uo pipefail
cd "$(dirname "$0")/.."
EXTRAS=evaluation,dashboard,quantization,slurm,sweeps,dev
export PIP_CONFIG_FILE=/dev/null PIP_DISABLE_PIP_VERSION_CHECK=1
unset PIP_FIND_LINKS PIP_EXTRA_INDEX_URL PIP_CONSTRAINT PIP_NO_INDEX
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

pythons=("$@")
if [ $# = 0 ]; then
	for version in 3.11 3.12 3.13; do
		for python in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python; do
			"$python" -c '' 2>/dev/null && pythons+=("$python") && break
		done
	done
fi
[ ${#pythons[@]} -gt 0 ] || { echo "no Python 3.11 to 3.13 here"; exit 2; }

code=0
for python in "${pythons[@]}"; do
	"$python" -m venv --clear "$folder/venv" || exit
	pip=("$folder/venv/bin/python" -m pip)
	"${pip[@]}" install --quiet --upgrade pip
	# fast-deps reads the metadata of a wheel without the wheel, where the index has no file of it
	if ! "${pip[@]}" install --dry-run --quiet --use-feature=fast-deps --report "$folder/report.json" ".[$EXTRAS]" \
		--constraint constraints.txt; then
		echo "$("$python" --version): does not resolve"
		code=1
		continue
	fi
	"$python" - "$folder/report.json" <<-'PYTHON'
		import json, platform, sys
		chosen = {item["metadata"]["name"]: item["metadata"]["version"] for item in json.load(open(sys.argv[1]))["install"]}
		versions = ", ".join(f"{name} {chosen.get(name, '-')}" for name in ("torch", "triton", "transformers"))
		print(f"Python {platform.python_version()}: {len(chosen)} packages, among them {versions}")
	PYTHON
done
exit $code
