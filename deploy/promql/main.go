// Command promql reads PromQL expressions, one a line, and prints what each of them selects.
// The selection is a JSON list of metric names with the labels that they are matched or
// grouped by. Its exit status is 1, with a message that quotes the expression, if one is not
// PromQL.
//
// With the argument eval it reads an [Evaluation], which is what targets served and when. It
// prints the alerts that fire on it, as a JSON list of [Firing].
//
// It is a module of its own so that the store's does not depend on Prometheus. The tests of
// deploy run it.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"slices"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/parser"
)

// Selected is one metric of an expression.
type Selected struct {
	Metric string
	// Equal are the values that labels must have.
	Equal map[string]string
	// Labels are all that the expression names, in a selector or to group by.
	Labels []string
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if slices.Equal(args, []string{"eval"}) {
		return eval(os.Stdin, os.Stdout)
	}
	p := parser.NewParser(parser.Options{})
	out := json.NewEncoder(os.Stdout)
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		expr, err := p.ParseExpr(in.Text())
		if err != nil {
			return fmt.Errorf("%s: %w", in.Text(), err)
		}
		if err := out.Encode(selected(expr)); err != nil {
			return err
		}
	}
	return in.Err()
}

func selected(expr parser.Expr) []Selected {
	list := []Selected{}
	parser.Inspect(expr, func(n parser.Node, path []parser.Node) error {
		v, ok := n.(*parser.VectorSelector)
		if !ok {
			return nil
		}
		s := Selected{Metric: v.Name, Equal: map[string]string{}}
		for _, m := range v.LabelMatchers {
			if m.Name == labels.MetricName {
				continue
			}
			s.Labels = append(s.Labels, m.Name)
			if m.Type == labels.MatchEqual {
				s.Equal[m.Name] = m.Value
			}
		}
		for _, p := range path { // what is grouped by above
			switch p := p.(type) {
			case *parser.AggregateExpr:
				s.Labels = append(s.Labels, p.Grouping...)
			case *parser.BinaryExpr:
				if p.VectorMatching != nil {
					s.Labels = append(s.Labels, p.VectorMatching.MatchingLabels...)
				}
			}
		}
		list = append(list, s)
		return nil
	})
	return list
}
