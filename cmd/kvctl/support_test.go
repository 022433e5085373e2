package main

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/pprof"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/devstore"
)

// unpack gives the files of a bundle by name.
func unpack(t *testing.T, name string) map[string]string {
	t.Helper()
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	zip, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	files := make(map[string]string)
	for r := tar.NewReader(zip); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		} else if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		files[strings.TrimPrefix(h.Name, "kvd-support/")] = string(b)
	}
}

// No value, key, password or token gets into a bundle, whether from the store, a process or a log.
func TestBundleHoldsNoSecrets(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 256 << 20, Providers: []string{"shm"}})
	e.must("", "put", "MARKkey", "MARKvalue")
	e.must("", "get", "MARKkey")
	mux := http.NewServeMux()
	mux.HandleFunc("/metrics", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "kvd_build_info 1\n")
	})
	mux.HandleFunc("/debug/pprof/", pprof.Index)
	page := httptest.NewServer(mux)
	defer page.Close()
	dir := t.TempDir()
	log := filepath.Join(dir, "MARKlog")
	lines := strings.Join([]string{
		`time=2026-01-01T00:00:00Z level=INFO msg="memory node is up" node=m1 regions=3 took=1.5s`,
		`time=2026-01-01T00:00:00Z level=ERROR msg="put failed" key=MARKa err="\"MARKb\": conflict" value="MARK c" token=12345678 password=87654321`,
		`{"time":"2026-01-01T00:00:00Z","level":"WARN","msg":"slow","key":"MARKd","err":"MARKe","args":["MARKf"],"more":{"a":"MARKg"},"count":7}`,
		`panic: MARKh`,
		`time=2026-01-01T00:00:00Z level=INFO msg=x MARKi`,
		`time=2026-01-01T00:00:00Z level=INFO msg=x unfinished="MARKj`,
		`{"level":"WARN","msg":"MARKk"`,
	}, "\n")
	if err := os.WriteFile(log, []byte(lines), 0o600); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "bundle.tar.gz")
	out := e.must("", "support", "bundle", file, "--http", page.URL, "--profiles", "--log", log)
	files := unpack(t, file)
	for name, text := range files {
		for _, secret := range []string{"MARK", "12345678", "87654321"} {
			if strings.Contains(text, secret) || strings.Contains(name, secret) {
				t.Errorf("%s holds %s:\n%s", name, secret, text)
			}
		}
		if !strings.Contains(out, name+"\n") {
			t.Errorf("%s is not listed:\n%s", name, out)
		}
	}
	const wantLog = `time=2026-01-01T00:00:00Z level=INFO msg="memory node is up" node=m1 regions=3 took=1.5s
time=2026-01-01T00:00:00Z level=ERROR msg="put failed" key=… err=… value=… token=… password=…
time="2026-01-01T00:00:00Z" level="WARN" msg="slow" key=… err=… args=… more=… count=7
lines that kvd did not write, left out: 4
`
	if got := files["logs/1.log"]; got != wantLog {
		t.Errorf("log:\n%s", got)
	}
	host := "http-1-" + strings.ReplaceAll(strings.TrimPrefix(page.URL, "http://"), ":", "-") + "/"
	if !strings.Contains(files["status.json"], `"cluster_id"`) || files[host+"metrics"] != "kvd_build_info 1\n" ||
		!strings.Contains(files[host+"goroutines"], "goroutine profile") || files[host+"heap"] == "" {
		t.Errorf("files: %v", files)
	}
	// It is not overwritten.
	if r := e.run("", "support", "bundle", file); r.code != ctl.ExitOther || len(unpack(t, file)) != len(files) {
		t.Errorf("again: %+v", r)
	}
}

// A source that does not answer is left out and named, and a password in an address is refused without being repeated.
func TestBundleOfWhatIsThere(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 256 << 20, Providers: []string{"shm"}})
	page := httptest.NewServer(http.NotFoundHandler())
	defer page.Close()
	file := filepath.Join(t.TempDir(), "bundle.tar.gz")
	r := e.run("", "support", "bundle", file, "--http", page.URL, "--log", filepath.Join(t.TempDir(), "none"))
	files := unpack(t, file)
	if r.code != ctl.ExitNo || strings.Count(r.stderr, "left out: ") != 2 || strings.Count(files["missing.txt"],
		"\n") !=
		2 || files["status.json"] == "" {
		t.Errorf("%+v %v", r, files)
	}
	for _, address := range []string{"http://ann:MARK@127.0.0.1:1", "ftp://127.0.0.1:1/MARK", "MARK",
		"http://127.0.0.1:1/?q=MARK", "http://%zz/MARK"} {
		r := e.run("", "support", "bundle", file+"2", "--http", address)
		if _, err := os.Stat(file + "2"); r.code != ctl.ExitUsage || strings.Contains(r.stderr, "MARK") ||
			!errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: %+v %v", address, r, err)
		}
	}
}
