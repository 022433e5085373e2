//go:build otel

package main

import "github.com/kvd-project/kvd/internal/otlp"

func init() { openExporter = otlp.Open }
