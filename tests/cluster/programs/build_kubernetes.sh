#!/bin/sh
# Build a real Kubernetes 1.20 from Debian's source package, once: build_kubernetes.sh FOLDER
# Debian 12, root, network to its mirrors. About ten minutes and 3 GB of disk, of which 360 MB are kept.
set -eu
target=${1:?a folder for the programs}
[ -x "$target/kubelet" ] && exit 0
export DEBIAN_FRONTEND=noninteractive
packages="golang-1.19-go golang-github-modern-go-reflect2-dev rsync make etcd-server containerd runc
    containernetworking-plugins busybox-static curl"
apt-get -qq install --yes --no-install-recommends $packages ||
    { apt-get -qq update; apt-get -qq install --yes --no-install-recommends $packages; }
work=$(mktemp -d "${TMPDIR:-/var/tmp}/kubernetes-build.XXXXXX")
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
cd "$work"
mkdir -p lists/partial cache/archives/partial parts home tree
# The machine's own mirrors, with sources.
for file in /etc/apt/sources.list.d/*.sources; do
    sed 's/^Types: deb$/Types: deb-src/' "$file" >> parts/sources.sources
    echo >> parts/sources.sources
done
apt="apt-get -qq -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts=$work/parts
    -o Dir::State::lists=$work/lists -o Dir::Cache=$work/cache -o APT::Sandbox::User=root"
$apt update
$apt source --download-only kubernetes
tar xzf kubernetes_*.orig.tar.gz -C tree --strip-components=1
cd tree
# The copy of this package in the tree crashes the API server under Go 1.18 and later.
rm -rf vendor/github.com/modern-go/reflect2
cp -r /usr/share/gocode/src/github.com/modern-go/reflect2 vendor/github.com/modern-go/reflect2
rm -f vendor/github.com/modern-go/reflect2/go.mod
mkdir -p .go/src/k8s.io
ln -s ../../.. .go/src/k8s.io/kubernetes
GOPATH=$PWD/.go PATH=/usr/lib/go-1.19/bin:/usr/bin:/bin HOME=$work/home CGO_ENABLED=0 GOPROXY=off \
    KUBE_GIT_VERSION=v1.20.2 KUBE_GIT_MAJOR=1 KUBE_GIT_MINOR=20 \
    nice -n 19 make WHAT="cmd/kube-apiserver cmd/kube-controller-manager cmd/kube-scheduler cmd/kubelet" >&2
mkdir -p "$target"
# The kubelet comes last: its presence says that all of them are there.
for program in kube-apiserver kube-controller-manager kube-scheduler kubelet; do
    mv "_output/bin/$program" "$target/$program"
done
