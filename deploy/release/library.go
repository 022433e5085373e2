package main

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"crypto/sha256"
	"debug/elf"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/blakesmith/ar"
	"github.com/goreleaser/nfpm/v2"
)

// library is libkvd of an architecture, as its ELF file tells it.
type library struct {
	file    string // libkvd.so.0.1.0
	soname  string // libkvd.so.0
	glibc   string // the oldest that it runs with, as 2.34
	symbols []string
}

// triplets are the architectures' as Debian's folders have them.
var triplets = map[string]string{"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}

// library reads libkvd. That of the RPM package is the same file.
func (r *release) library(arch string) (*library, error) {
	names, err := filepath.Glob(r.work + "/linux_" + arch + "/deb/libkvd.so.*.*.*")
	if err != nil || len(names) != 1 {
		return nil, errors.Join(fmt.Errorf("linux_%s/deb/libkvd.so.*.*.*: %d files, want one", arch, len(names)), err)
	}
	f, err := elf.Open(names[0])
	if err != nil {
		return nil, err
	}
	defer f.Close()
	lib := &library{file: filepath.Base(names[0])}
	soname, err := f.DynString(elf.DT_SONAME)
	if err != nil || len(soname) != 1 {
		return nil, errors.Join(fmt.Errorf("%s: SONAME %q, want one", lib.file, soname), err)
	}
	lib.soname = soname[0]
	needs, err := f.DynamicVersionNeeds()
	if err != nil {
		return nil, err
	}
	newest := 0
	for _, n := range needs {
		for _, d := range n.Needs {
			text, is := strings.CutPrefix(d.Dep, "GLIBC_2.")
			minor, _, _ := strings.Cut(text, ".")
			v, err := strconv.Atoi(minor)
			if !is || err != nil {
				return nil, fmt.Errorf("%s: needs %s of %s, want GLIBC_2.x alone", lib.file, d.Dep, n.Name)
			}
			newest = max(newest, v)
		}
	}
	lib.glibc = fmt.Sprintf("2.%d", newest)
	all, err := f.DynamicSymbols()
	if err != nil {
		return nil, err
	}
	for _, s := range all {
		if s.Section != elf.SHN_UNDEF {
			lib.symbols = append(lib.symbols, s.Name+"@"+cmp.Or(s.Version, "Base"))
		}
	}
	slices.Sort(lib.symbols)
	return lib, nil
}

// libraryBundles are the packages of libkvd: the shared library, and what programs are built with.
func (r *release) libraryBundles(arch, kind string, lib *library) []bundle {
	const about = "The client library of the kvd store"
	built := r.work + "/linux_" + arch + "/" + kind + "/"
	run := bundle{name: "libkvd0", section: "libs", group: "System Environment/Libraries", about: about +
		"\nPrograms use the store through a broker on their machine: kvd broker."}
	dev := bundle{name: "libkvd-dev", section: "libdevel", group: "Development/Libraries", about: about +
		" (development files)\nHeader, static library, and files for pkg-config and CMake."}
	dir := "/usr/lib/" + triplets[arch]
	// Packages of programs are made against this version, and have to find no earlier one.
	version := strings.Replace(strings.TrimPrefix(r.version, "v"), "-", "~", 1)
	if kind == "deb" {
		run.more = nfpm.Overridables{Depends: []string{"libc6 (>= " + lib.glibc + ")"}, Deb: nfpm.Deb{
			Triggers: nfpm.DebTriggers{ActivateNoAwait: []string{"ldconfig"}},
			Fields:   map[string]string{"Multi-Arch": "same"}}}
		symbols := lib.soname + " " + run.name + " #MINVER#\n"
		for _, s := range lib.symbols {
			symbols += " " + s + " " + version + "\n"
		}
		run.control = map[string][]byte{"symbols": []byte(symbols)}
		dev.more = nfpm.Overridables{Depends: []string{run.name + " (= " + version + "-1)"},
			Recommends: []string{"libc6-dev", "pkg-config"},
			Deb:        nfpm.Deb{Fields: map[string]string{"Multi-Arch": "same"}}}
	} else {
		dir, run.name, dev.name = "/usr/lib64", "libkvd", "libkvd-devel"
		run.more = nfpm.Overridables{Depends: []string{"libc.so.6(GLIBC_" + lib.glibc + ")(64bit)"},
			Provides: []string{lib.soname + "()(64bit)"}}
		dev.more = nfpm.Overridables{Depends: []string{run.name + " = " + version + "-1"}}
	}
	run.list = []file{
		{from: built + lib.file, to: dir + "/" + lib.file, mode: 0o644},
		{from: lib.file, to: dir + "/" + lib.soname, link: true},
		{from: r.tree + "/LICENSE", to: "/usr/share/doc/" + run.name + "/copyright", mode: 0o644},
	}
	dev.list = []file{
		{from: r.tree + "/client/c/kvd.h", to: "/usr/include/kvd.h", mode: 0o644},
		{from: built + "libkvd.a", to: dir + "/libkvd.a", mode: 0o644},
		{from: lib.soname, to: dir + "/libkvd.so", link: true},
		{from: built + "kvd.pc", to: dir + "/pkgconfig/kvd.pc", mode: 0o644},
		{from: r.tree + "/LICENSE", to: "/usr/share/doc/" + dev.name + "/copyright", mode: 0o644},
		{from: r.tree + "/client/c/README.md", to: "/usr/share/doc/" + dev.name + "/README.md", mode: 0o644},
	}
	for _, name := range []string{"kvd-config.cmake", "kvd-config-version.cmake"} {
		dev.list = append(dev.list, file{from: r.tree + "/client/c/" + name, to: dir + "/cmake/kvd/" + name,
			mode: 0o644})
	}
	for _, name := range []string{"hello.c", "CMakeLists.txt"} {
		dev.list = append(dev.list, file{from: r.tree + "/examples/c/" + name,
			to: "/usr/share/doc/" + dev.name + "/examples/" + name, mode: 0o644})
	}
	return []bundle{run, dev}
}

// withControl is a Debian package with more files beside its control file, which nfpm cannot be told.
func (r *release) withControl(made []byte, more map[string][]byte) ([]byte, error) {
	var out bytes.Buffer
	from, to := ar.NewReader(bytes.NewReader(made)), ar.NewWriter(&out)
	if err := to.WriteGlobalHeader(); err != nil {
		return nil, err
	}
	for {
		h, err := from.Next()
		if errors.Is(err, io.EOF) {
			return out.Bytes(), nil
		}
		if err != nil {
			return nil, err
		}
		part, err := io.ReadAll(from)
		if err != nil {
			return nil, err
		}
		if h.Name == "control.tar.gz" {
			if part, err = r.added(part, more); err != nil {
				return nil, err
			}
			h.Size = int64(len(part))
		}
		if err := to.WriteHeader(h); err != nil {
			return nil, err
		}
		if _, err := to.Write(part); err != nil {
			return nil, err
		}
	}
}

// added is a compressed archive with more files.
func (r *release) added(archive []byte, more map[string][]byte) ([]byte, error) {
	z, err := gzip.NewReader(bytes.NewReader(archive))
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	packed := gzip.NewWriter(&out)
	from, to := tar.NewReader(z), tar.NewWriter(packed)
	for {
		h, err := from.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		if err := to.WriteHeader(h); err != nil {
			return nil, err
		}
		if _, err := io.Copy(to, from); err != nil {
			return nil, err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(more)) {
		if err := to.WriteHeader(&tar.Header{Name: "./" + name, Mode: 0o644, Size: int64(len(more[name])),
			ModTime: r.when, Format: tar.FormatGNU}); err != nil {
			return nil, err
		}
		if _, err := to.Write(more[name]); err != nil {
			return nil, err
		}
	}
	if err := to.Close(); err != nil {
		return nil, err
	}
	if err := packed.Close(); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

// component is a part of a list of what something consists of (CycloneDX 1.6).
type component struct {
	Type     string              `json:"type"`
	Ref      string              `json:"bom-ref"`
	Name     string              `json:"name"`
	Version  string              `json:"version"`
	PURL     string              `json:"purl"`
	Hashes   []map[string]string `json:"hashes"`
	Licenses []map[string]any    `json:"licenses"`
}

// of is the component that a file is.
func (r *release) of(name, version, purl, file string) (*component, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	return &component{Type: "library", Ref: purl, Name: name, Version: version, PURL: purl,
		Hashes:   []map[string]string{{"alg": "SHA-256", "content": fmt.Sprintf("%x", sha256.Sum256(b))}},
		Licenses: []map[string]any{{"license": map[string]string{"id": "Apache-2.0"}}}}, nil
}

// libraryBOMs writes what libkvd and the wheel consist of. Neither has anything of others in it.
func (r *release) libraryBOMs(arch string, lib *library) error {
	machine := map[string]string{"amd64": "x86_64", "arm64": "aarch64"}[arch]
	wheels, err := filepath.Glob(r.out + "/kvd-*_" + machine + ".whl")
	if err != nil || len(wheels) != 1 {
		return errors.Join(fmt.Errorf("%d wheels of %s in %s, want one", len(wheels), arch, r.out), err)
	}
	number := strings.TrimPrefix(r.version, "v")
	native, err := r.of("libkvd", r.version, "pkg:generic/libkvd@"+number+"?arch="+arch,
		r.work+"/linux_"+arch+"/deb/"+lib.file)
	if err != nil {
		return err
	}
	python := strings.Split(filepath.Base(wheels[0]), "-")[1]
	wheel, err := r.of("kvd", python, "pkg:pypi/kvd@"+python, wheels[0])
	if err != nil {
		return err
	}
	if err := r.writeBOM("libkvd-"+number+"-linux-"+arch, native); err != nil {
		return err
	}
	return r.writeBOM("kvd-python-"+number+"-linux-"+arch, wheel, native)
}

func (r *release) writeBOM(name string, of *component, parts ...*component) error {
	refs := []string{}
	for _, p := range parts {
		refs = append(refs, p.Ref)
	}
	b, err := json.MarshalIndent(map[string]any{
		"$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json", "bomFormat": "CycloneDX", "specVersion": "1.6",
		"version": 1, "metadata": map[string]any{"component": of},
		"components":   slices.Concat([]*component{}, parts),
		"dependencies": []any{map[string]any{"ref": of.Ref, "dependsOn": refs}},
	}, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(r.out+"/"+name+".cdx.json", append(b, '\n'), 0o644)
}
