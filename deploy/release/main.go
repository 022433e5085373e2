// Command release makes what a release consists of out of programs and libraries that are built. For each architecture,
// that is an archive and packages for Debian and RPM, of the programs and of libkvd. It also makes the checksums of all
// that lies beside them. Equal input gives equal bytes: every time is that of the release.
//
// It is a module of its own so that the store's does not depend on nfpm. release.sh runs it.
package main

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/goreleaser/nfpm/v2"
	"github.com/goreleaser/nfpm/v2/deb"
	"github.com/goreleaser/nfpm/v2/files"
	"github.com/goreleaser/nfpm/v2/rpm"
)

// versionForm is that of semver.org without build metadata, behind a v.
var versionForm = regexp.MustCompile(`^v(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}(-[0-9A-Za-z]+(\.[0-9A-Za-z]+)*)?$`)

// release is what the command line says.
type release struct {
	version string
	// tree is the store's; work has linux_ARCH/{kvd,kvctl}, linux_ARCH/KIND/ with libkvd as a kind of package has it,
	// and pages/, and takes what packages need of files that the tree does not have; out has the wheels, and takes the
	// release.
	tree, work, out string
	arches          string // those of Go, separated by spaces
	when            time.Time
}

func main() {
	var r release
	var seconds int64
	flag.StringVar(&r.version, "version", "", "as v0.1.0")
	flag.StringVar(&r.tree, "tree", "../..", "the store's source")
	flag.StringVar(&r.arches, "arches", "amd64 arm64", "architectures")
	flag.StringVar(&r.work, "work", "", "folder of linux_ARCH/ and pages/")
	flag.StringVar(&r.out, "out", "", "folder for the release")
	flag.Int64Var(&seconds, "time", 0, "the time of everything, in seconds since 1970")
	flag.Parse()
	r.when = time.Unix(seconds, 0).UTC()
	if err := r.run(); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

func (r *release) run() error {
	if !versionForm.MatchString(r.version) {
		return fmt.Errorf("version %q: want vMAJOR.MINOR.PATCH or vMAJOR.MINOR.PATCH-PRE", r.version)
	}
	if r.work == "" || r.out == "" || r.when.Unix() <= 0 {
		return errors.New("-work, -out and -time are all needed")
	}
	for _, arch := range strings.Fields(r.arches) {
		list, err := r.files(arch)
		if err != nil {
			return err
		}
		if err := r.archive(arch, list); err != nil {
			return err
		}
		lib, err := r.library(arch)
		if err != nil {
			return err
		}
		if err := r.libraryBOMs(arch, lib); err != nil {
			return err
		}
		for _, kind := range []string{"deb", "rpm"} {
			for _, b := range append(r.libraryBundles(arch, kind, lib), r.programs(list)) {
				if err := r.pack(kind, arch, b); err != nil {
					return err
				}
			}
		}
	}
	return r.checksums()
}

// file is one of a release.
type file struct {
	from string // as it lies here
	to   string // as a package installs it
	mode os.FileMode
	// config: the administrator changes it, and packages keep the change.
	config bool
	link   bool   // a symbolic link to from
	only   string // the kind of package, if not every one
}

// files lists the files of an architecture.
func (r *release) files(arch string) ([]file, error) {
	list := []file{
		{from: r.work + "/linux_" + arch + "/kvd", to: "/usr/bin/kvd", mode: 0o755},
		{from: r.work + "/linux_" + arch + "/kvctl", to: "/usr/bin/kvctl", mode: 0o755},
		{from: r.tree + "/LICENSE", to: "/usr/share/doc/kvd/copyright", mode: 0o644},
		{from: r.tree + "/CHANGELOG.md", to: "/usr/share/doc/kvd/CHANGELOG.md", mode: 0o644},
		{from: r.tree + "/docs/install.md", to: "/usr/share/doc/kvd/install.md", mode: 0o644},
		{from: r.tree + "/docs/tls.md", to: "/usr/share/doc/kvd/tls.md", mode: 0o644},
		{from: r.tree + "/docs/gateway.md", to: "/usr/share/doc/kvd/gateway.md", mode: 0o644},
		{from: r.tree + "/docs/native.md", to: "/usr/share/doc/kvd/native.md", mode: 0o644},
		{from: r.tree + "/docs/python.md", to: "/usr/share/doc/kvd/python.md", mode: 0o644},
		{from: r.tree + "/docs/memory.md", to: "/usr/share/doc/kvd/memory.md", mode: 0o644},
		{from: r.tree + "/docs/changes.md", to: "/usr/share/doc/kvd/changes.md", mode: 0o644},
		{from: r.tree + "/docs/backup.md", to: "/usr/share/doc/kvd/backup.md", mode: 0o644},
		{from: r.tree + "/docs/snapshots.md", to: "/usr/share/doc/kvd/snapshots.md", mode: 0o644},
		{from: r.tree + "/docs/watching.md", to: "/usr/share/doc/kvd/watching.md", mode: 0o644},
		{from: r.tree + "/docs/metrics.md", to: "/usr/share/doc/kvd/metrics.md", mode: 0o644},
		{from: r.tree + "/docs/failures.md", to: "/usr/share/doc/kvd/failures.md", mode: 0o644},
		{from: r.tree + "/deploy/kvd-memnode-rdma.conf", to: "/usr/share/doc/kvd/examples/kvd-memnode-rdma.conf",
			mode: 0o644},
		{from: r.tree + "/deploy/alerts.yaml", to: "/usr/share/doc/kvd/examples/alerts.yaml", mode: 0o644},
		{from: r.tree + "/deploy/grafana/kvd.json", to: "/usr/share/doc/kvd/examples/grafana.json", mode: 0o644},
	}
	for _, role := range []string{"directory", "memnode", "gateway", "broker", "archive"} {
		list = append(list, file{from: r.tree + "/deploy/" + role + ".yaml", to: "/etc/kvd/" + role + ".yaml",
			mode: 0o644, config: true})
		unit, err := r.unit("kvd-" + role + ".service")
		if err != nil {
			return nil, err
		}
		list = append(list, file{from: unit, to: "/usr/lib/systemd/system/kvd-" + role + ".service", mode: 0o644})
	}
	for _, name := range []string{"kvd", "kvctl"} {
		list = append(list,
			file{from: r.work + "/pages/bash/" + name, to: "/usr/share/bash-completion/completions/" + name,
				mode: 0o644},
			file{from: r.work + "/pages/fish/" + name + ".fish", to: "/usr/share/fish/vendor_completions.d/" + name +
				".fish", mode: 0o644},
			file{from: r.work + "/pages/zsh/_" + name, to: "/usr/share/zsh/vendor-completions/_" + name, mode: 0o644,
				only: "deb"},
			file{from: r.work + "/pages/zsh/_" + name, to: "/usr/share/zsh/site-functions/_" + name, mode: 0o644,
				only: "rpm"})
	}
	pages, err := filepath.Glob(r.work + "/pages/man1/*.1")
	if err != nil || len(pages) == 0 {
		return nil, errors.Join(fmt.Errorf("%s/pages/man1 has no pages", r.work), err)
	}
	for _, page := range pages {
		packed, err := r.gzipped(page)
		if err != nil {
			return nil, err
		}
		list = append(list, file{from: packed, to: "/usr/share/man/man1/" + filepath.Base(packed), mode: 0o644})
	}
	slices.SortFunc(list, func(a, b file) int { return cmp.Compare(a.to, b.to) })
	return list, nil
}

// unit makes a unit of deploy/ that starts the program where packages install it.
func (r *release) unit(name string) (string, error) {
	b, err := os.ReadFile(r.tree + "/deploy/" + name)
	if err != nil {
		return "", err
	}
	const here, there = "ExecStart=/usr/local/bin/kvd ", "ExecStart=/usr/bin/kvd "
	if strings.Count(string(b), here) != 1 {
		return "", fmt.Errorf("deploy/%s: want one line that begins with %q", name, here)
	}
	made := r.work + "/" + name
	return made, os.WriteFile(made, []byte(strings.Replace(string(b), here, there, 1)), 0o644)
}

func (r *release) gzipped(name string) (string, error) {
	b, err := os.ReadFile(name)
	if err != nil {
		return "", err
	}
	var packed bytes.Buffer
	w, err := gzip.NewWriterLevel(&packed, gzip.BestCompression)
	if err != nil {
		return "", err
	}
	if _, err := w.Write(b); err != nil {
		return "", err
	}
	if err := w.Close(); err != nil {
		return "", err
	}
	return name + ".gz", os.WriteFile(name+".gz", packed.Bytes(), 0o644)
}

// archive writes a tar.gz of list, below a folder of its name, for machines without packages. Units start the program
// of /usr/bin there, too.
func (r *release) archive(arch string, list []file) (err error) {
	name := fmt.Sprintf("kvd-%s-linux-%s", strings.TrimPrefix(r.version, "v"), arch)
	out, err := os.Create(r.out + "/" + name + ".tar.gz")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	z := gzip.NewWriter(out)
	t := tar.NewWriter(z)
	for _, f := range list {
		if f.only == "rpm" {
			continue
		}
		b, err := os.ReadFile(f.from)
		if err != nil {
			return err
		}
		if err := t.WriteHeader(&tar.Header{Name: name + f.to, Mode: int64(f.mode), Size: int64(len(b)),
			ModTime: r.when, Format: tar.FormatUSTAR}); err != nil {
			return err
		}
		if _, err := t.Write(b); err != nil {
			return err
		}
	}
	if err := t.Close(); err != nil {
		return err
	}
	return z.Close()
}

// bundle is what becomes a package.
type bundle struct {
	name           string
	about          string // the first line is the summary
	section, group string // of Debian, of RPM
	more           nfpm.Overridables
	control        map[string][]byte // files that Debian's package tools read, by name
	list           []file
}

// programs are the programs' package.
func (r *release) programs(list []file) bundle {
	return bundle{name: "kvd", section: "database", group: "Applications/Databases", list: list,
		about: "A key-value store in the memory of other machines\nkvd runs directory nodes, memory nodes, gateways " +
			"and brokers; kvctl uses and inspects a store.\nInstalled units neither start nor restart by themselves.",
		more: nfpm.Overridables{Recommends: []string{"systemd"}, Scripts: nfpm.Scripts{
			PostInstall: r.tree + "/deploy/release/scripts/postinstall.sh",
			PreRemove:   r.tree + "/deploy/release/scripts/preremove.sh",
			PostRemove:  r.tree + "/deploy/release/scripts/postremove.sh",
		}}}
}

// pack writes a package.
func (r *release) pack(kind, arch string, b bundle) error {
	info := nfpm.WithDefaults(&nfpm.Info{
		Name: b.name, Arch: arch, Platform: "linux", Version: r.version, Release: "1", MTime: r.when,
		Section: b.section, Priority: "optional", Maintainer: "The kvd project <kvd@kvd-project.example>",
		Homepage: "https://github.com/kvd-project/kvd", License: "Apache-2.0", Description: b.about,
		Overridables: b.more,
	})
	summary, _, _ := strings.Cut(b.about, "\n")
	info.RPM = nfpm.RPM{BuildHost: "localhost", Group: b.group, Summary: summary}
	for _, f := range b.list {
		if f.only != "" && f.only != kind {
			continue
		}
		c := &files.Content{Source: f.from, Destination: f.to, FileInfo: &files.ContentFileInfo{
			Mode: f.mode, MTime: r.when, Owner: "root", Group: "root"}}
		switch {
		case f.config:
			c.Type = files.TypeConfigNoReplace
		case f.link:
			c.Type = files.TypeSymlink
		}
		info.Contents = append(info.Contents, c)
	}
	if err := nfpm.PrepareForPackager(info, kind); err != nil {
		return err
	}
	p := map[string]nfpm.Packager{"deb": deb.Default, "rpm": rpm.DefaultRPM}[kind]
	name := p.ConventionalFileName(info)
	var made bytes.Buffer
	if err := p.Package(info, &made); err != nil {
		return fmt.Errorf("package %s: %w", name, err)
	}
	text := made.Bytes()
	if len(b.control) > 0 {
		var err error
		if text, err = r.withControl(text, b.control); err != nil {
			return fmt.Errorf("package %s: %w", name, err)
		}
	}
	return os.WriteFile(r.out+"/"+name, text, 0o644)
}

// checksums writes SHA256SUMS, as sha256sum -c reads it, of all files of the release.
func (r *release) checksums() error {
	const name = "SHA256SUMS"
	entries, err := os.ReadDir(r.out)
	if err != nil {
		return err
	}
	var sums strings.Builder
	for _, e := range entries {
		if e.Name() == name || !e.Type().IsRegular() {
			continue
		}
		f, err := os.Open(filepath.Join(r.out, e.Name()))
		if err != nil {
			return err
		}
		h := sha256.New()
		_, err = io.Copy(h, f)
		if err := errors.Join(err, f.Close()); err != nil {
			return err
		}
		fmt.Fprintf(&sums, "%x  %s\n", h.Sum(nil), e.Name())
	}
	return os.WriteFile(filepath.Join(r.out, name), []byte(sums.String()), 0o644)
}
