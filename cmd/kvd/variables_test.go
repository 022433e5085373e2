package main

import (
	"bytes"
	"context"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/internal/testutil"
)

// A variable that nearly is a setting of the role is told of: by its log when it starts, and by kvd config.
func TestMisspeltVariable(t *testing.T) {
	taken := testutil.Listen(t)
	addr := taken.Addr().String()
	for typed, meant := range map[string]string{"KVD_LOGLEVEL": "KVD_LOG_LEVEL", "kvd_log_level": "KVD_LOG_LEVEL",
		"KVD_PORT": "", "KVD_DIRECTORY": "", "KVD_NAMESPACE": ""} {
		t.Run(typed, func(t *testing.T) {
			t.Setenv(typed, "127.0.0.1:1")
			for _, args := range [][]string{
				{"dev", "--listen", addr},
				{"directory", "--id=d", "--data-dir=" + t.TempDir(), "--listen=" + addr, "--bootstrap"},
				{"memnode", "--name=m", "--keep=off", "--listen-tcp=" + addr},
				{"gateway", "--listen=" + addr, "--listen-memcached=off"},
				{"config", "janitor"},
			} {
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				var out, errs bytes.Buffer
				code := run(ctx, args, &out, &errs)
				cancel()
				if want := exitFailure; args[0] != "config" && code != want {
					t.Fatalf("kvd %q: status %d: %s", args, code, &errs)
				}
				told := errs.String()
				if meant == "" && strings.Contains(told, "environment") || meant != "" &&
					(!strings.Contains(told, typed+" ") || !strings.Contains(told, meant)) {
					t.Errorf("kvd %q: %s", args, told)
				}
				if meant != "" && strings.Count(told, typed+" ") != 1 {
					t.Errorf("kvd %q tells more than once: %s", args, told)
				}
			}
		})
	}
}
