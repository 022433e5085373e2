// Package config reads the settings of kvd's roles from a file, the environment
// and flags, and is the only package that knows viper.
//
// It leaves what a setting does to the role, which fills the Options of a
// library from the struct it gets here. Start with [Directory], one struct per
// role, then [Load]. Everything may be called concurrently, except that a
// settings value has one user at a time.
//
// A flag wins over KVD_ in the environment, that over the file, and that over
// the default. A key of the file that the role does not have is refused. A
// variable is not: KVD_DIRECTORY serves kvctl too, and orchestrators make up
// names such as KVD_PORT for a service called kvd. [Misspelt] finds those that are
// nearly a setting.
//
// The cautions are viper's own: an instance is not safe for concurrent use and
// folds case. So each [Load] makes one, decodes it exactly, and drops it, and no
// key is a name that a user chose.
package config

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-viper/mapstructure/v2"
	"github.com/spf13/pflag"
	"github.com/spf13/viper"
	"go.yaml.in/yaml/v3"

	"github.com/kvd-project/kvd/internal/spelling"
)

// EnvPrefix begins the names of the environment's settings: data-dir is
// KVD_DATA_DIR, tls.ca is KVD_TLS_CA.
const EnvPrefix = "KVD"

// Settings is a pointer to one role's struct.
type Settings interface {
	// Validate joins every problem, each a *Problem.
	Validate() error
}

// Problem is one setting that will not do.
type Problem struct {
	Key    string // as in a file: tls.ca
	Value  string // empty if the setting is missing
	Why    string // what is wanted instead
	Source string // what set it: a file's name, KVD_MEMORY, --memory; empty: the default
}

func (p *Problem) Error() string {
	s := p.Key
	if p.Value != "" {
		s += " is " + p.Value
	}
	if p.Source != "" {
		s += " (from " + p.Source + ")"
	}
	return s + ": " + p.Why
}

// field is one setting of a role.
type field struct {
	key    string // tls.ca
	usage  string
	secret bool
	value  reflect.Value
}

// Redacted stands for a secret that is not shown. It is refused as one: everybody knows it.
const Redacted = "REDACTED"

func (f field) flag() string { return strings.ReplaceAll(f.key, ".", "-") }

func (f field) env() string {
	return EnvPrefix + "_" + strings.ToUpper(strings.NewReplacer("-", "_", ".", "_").Replace(f.key))
}

// fields lists the settings of s in the order of its struct.
func fields(s Settings) []field { return appendFields(nil, "", reflect.ValueOf(s).Elem()) }

// keys are the names of fs.
func keys(fs []field) (names []string) {
	for _, f := range fs {
		names = append(names, f.key)
	}
	return names
}

func appendFields(fs []field, prefix string, v reflect.Value) []field {
	for i := range v.NumField() {
		t := v.Type().Field(i)
		key := prefix + t.Tag.Get("mapstructure")
		if v.Field(i).Kind() == reflect.Struct {
			fs = appendFields(fs, key+".", v.Field(i))
			continue
		}
		fs = append(fs, field{key, t.Tag.Get("usage"), t.Tag.Get("secret") == "true", v.Field(i)})
	}
	return fs
}

// Flags defines a flag for each setting of s, whose values are the defaults that
// the help text shows.
func Flags(fs *pflag.FlagSet, s Settings) {
	for _, f := range fields(s) {
		switch v := f.value.Interface().(type) {
		case bool:
			fs.Bool(f.flag(), v, f.usage)
		case []string:
			fs.StringSlice(f.flag(), v, f.usage)
		default:
			fs.Var(&text{s: format(f.value), kind: kindOf(f.value.Type())}, f.flag(), f.usage)
		}
	}
}

// text is a flag that [Load] parses, so that flags, environment and file obey
// one syntax and report mistakes together.
type text struct{ s, kind string }

func (t *text) String() string     { return t.s }
func (t *text) Set(s string) error { t.s = s; return nil }
func (t *text) Type() string       { return t.kind }

var (
	sizeType     = reflect.TypeFor[Size]()
	durationType = reflect.TypeFor[time.Duration]()
)

func kindOf(t reflect.Type) string {
	switch t {
	case sizeType:
		return "size"
	case durationType:
		return "duration"
	}
	if t.Kind() == reflect.Int {
		return "number" // viper reads a flag of type int itself, and bad ones as 0
	}
	return t.Kind().String()
}

func format(v reflect.Value) string {
	if l, ok := v.Interface().([]string); ok {
		return strings.Join(l, ",")
	}
	return fmt.Sprint(v.Interface())
}

// Load reads s, which holds the defaults, from file, unless that is empty, the
// environment, and the flags of fs, unless that is nil. An error that IsInvalid
// says that s was read and failed only to validate.
func Load(s Settings, file string, fs *pflag.FlagSet) error {
	_, err := LoadGiven(s, file, fs)
	return err
}

// LoadGiven is Load, and its first result tells of a key whether anything set it; it is
// nil if s was not read.
func LoadGiven(s Settings, file string, fs *pflag.FlagSet) (given func(key string) bool, err error) {
	v := viper.New()
	known := fields(s)
	for _, f := range known {
		v.SetDefault(f.key, f.value.Interface())
		if err := v.BindEnv(f.key, f.env()); err != nil {
			return nil, err
		}
		if fs == nil {
			continue
		}
		if fl := fs.Lookup(f.flag()); fl != nil {
			if err := v.BindPFlag(f.key, fl); err != nil {
				return nil, err
			}
		}
	}
	inFile := make(map[string]bool)
	if file != "" {
		if inFile, err = readFile(v, file, known); err != nil {
			return nil, err
		}
	}
	// source says what set a key.
	source := func(key string) string {
		i := slices.IndexFunc(known, func(f field) bool { return f.key == key })
		if i < 0 {
			return file
		}
		f := known[i]
		switch {
		case fs != nil && fs.Changed(f.flag()):
			return "--" + f.flag()
		case os.Getenv(f.env()) != "":
			return f.env()
		case inFile[key]:
			return file
		}
		return ""
	}
	err = v.UnmarshalExact(s, viper.DecodeHook(mapstructure.DecodeHookFuncValue(decode)),
		func(c *mapstructure.DecoderConfig) {
			c.WeaklyTypedInput = false
			c.ZeroFields = true // a list replaces the default, it does not overlay it
		})
	if err != nil {
		return nil, withoutSecrets(attribute(err, source), known)
	}
	given = func(key string) bool { return source(key) != "" }
	for _, f := range known {
		if f.secret && f.value.String() == Redacted {
			err = errors.Join(err, &Problem{Key: f.key, Why: "kvd config left it out: put it there"})
		}
	}
	if err := errors.Join(err, s.Validate()); err != nil {
		return given, &invalid{withoutSecrets(attribute(err, source), known)}
	}
	return given, nil
}

// withoutSecrets is err, of attribute, without the values of secret settings.
func withoutSecrets(err error, known []field) error {
	all, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return err
	}
	for _, e := range all.Unwrap() {
		p, ok := e.(*Problem)
		if ok && slices.ContainsFunc(known, func(f field) bool {
			return f.secret && strings.HasPrefix(p.Key+".", f.key+".")
		}) {
			p.Value = "" // attribute made p
		}
	}
	return err
}

type invalid struct{ error }

func (e *invalid) Unwrap() error { return e.error }

// IsInvalid tells whether err comes of Validate alone, so that the settings are
// what file, environment and flags say.
func IsInvalid(err error) bool { return errors.As(err, new(*invalid)) }

// readFile merges file into v and gives the keys it sets.
func readFile(v *viper.Viper, file string, known []field) (map[string]bool, error) {
	ext := strings.TrimPrefix(filepath.Ext(file), ".")
	if !slices.Contains([]string{"yaml", "yml", "toml", "json"}, ext) {
		return nil, fmt.Errorf("configuration file %s: want a name that ends in .yaml, .toml or .json", file)
	}
	v.SetConfigFile(file)
	if err := v.ReadInConfig(); err != nil {
		if pe := (*os.PathError)(nil); errors.As(err, &pe) {
			return nil, fmt.Errorf("configuration file %w", err)
		}
		return nil, fmt.Errorf("configuration file %s: %w", file, err)
	}
	// Only what the file holds, without defaults and environment.
	alone := viper.New()
	alone.SetConfigFile(file)
	if err := alone.ReadInConfig(); err != nil {
		return nil, fmt.Errorf("configuration file %s: %w", file, err)
	}
	var errs []error
	set := make(map[string]bool)
	for _, key := range alone.AllKeys() {
		set[key] = true
		if slices.ContainsFunc(known, func(f field) bool { return f.key == key }) {
			continue
		}
		section := slices.ContainsFunc(known, func(f field) bool { return strings.HasPrefix(f.key, key+".") })
		switch {
		case section && alone.Get(key) == nil: // tls: with everything below commented out
		case section:
			errs = append(errs, &Problem{Key: key, Value: show(alone.Get(key)), Source: file, Why: "want a section"})
		default:
			why := "there is no such setting" + spelling.DidYouMean(spelling.Near(key, keys(known)))
			errs = append(errs, &Problem{Key: key, Source: file, Why: why})
		}
	}
	return set, errors.Join(errs...)
}

func show(v any) string {
	if s, ok := v.(string); ok {
		return fmt.Sprintf("%q", s)
	}
	return fmt.Sprint(v)
}

// decode converts one value of a file, a variable or a flag, strictly: a number
// is no duration, and no text.
func decode(from, to reflect.Value) (any, error) {
	if from.Type() == to.Type() || to.Kind() == reflect.Struct {
		return from.Interface(), nil
	}
	fail := func(why string) (any, error) {
		return nil, &Problem{Value: show(from.Interface()), Why: why}
	}
	str, isText := from.Interface().(string)
	n, isInt := integer(from)
	switch {
	case to.Type() == sizeType && isText:
		v, err := ParseSize(str)
		if err != nil {
			return fail(err.Error())
		}
		return v, nil
	case to.Type() == sizeType && isInt && n >= 0:
		return Size(n), nil
	case to.Type() == sizeType:
		return fail(wantSize)
	case to.Type() == durationType && isText:
		if v, err := time.ParseDuration(strings.TrimSpace(str)); err == nil {
			return v, nil
		}
		fallthrough
	case to.Type() == durationType:
		return fail("want a duration with its unit, such as 500ms or 2s")
	case to.Kind() == reflect.String:
		return fail("want text: put it in quotes")
	case to.Kind() == reflect.Int && isInt:
		return n, nil
	case to.Kind() == reflect.Int:
		v, err := strconv.Atoi(strings.TrimSpace(str))
		if err != nil {
			return fail("want a whole number")
		}
		return v, nil
	case to.Kind() == reflect.Bool:
		switch strings.ToLower(strings.TrimSpace(str)) {
		case "true", "1", "yes", "on":
			return true, nil
		case "false", "0", "no", "off":
			return false, nil
		}
		return fail("want true or false")
	case to.Kind() == reflect.Slice:
		return list(from, fail)
	}
	return fail("want " + to.Type().String())
}

// list takes a sequence of text, or text with commas.
func list(from reflect.Value, fail func(string) (any, error)) (any, error) {
	out := []string{}
	switch l := from.Interface().(type) {
	case string:
		for s := range strings.SplitSeq(l, ",") {
			if s = strings.TrimSpace(s); s != "" {
				out = append(out, s)
			}
		}
	case []any:
		for _, e := range l {
			s, ok := e.(string)
			if !ok {
				return fail("want a list of texts")
			}
			out = append(out, s)
		}
	default:
		return fail("want a list of texts")
	}
	return out, nil
}

// integer gives v's value if it is a whole number; JSON knows only floats.
func integer(v reflect.Value) (int, bool) {
	switch {
	case v.CanInt():
		return int(v.Int()), true
	case v.CanFloat() && v.Float() == float64(int(v.Float())):
		return int(v.Float()), true
	}
	return 0, false
}

// attribute turns mapstructure's errors into problems, and says of each where
// its value comes from.
func attribute(err error, source func(key string) string) error {
	var errs []error
	var walk func(err error, key string)
	walk = func(err error, key string) {
		switch e := err.(type) {
		case *Problem:
			q := *e
			if q.Key == "" {
				q.Key = key
			}
			if q.Source == "" {
				q.Source = source(q.Key)
			}
			errs = append(errs, &q)
		case *mapstructure.DecodeError:
			walk(e.Unwrap(), strings.ToLower(e.Name()))
		case interface{ Unwrap() []error }:
			for _, err := range e.Unwrap() {
				walk(err, key)
			}
		case interface{ Unwrap() error }:
			walk(e.Unwrap(), key)
		default:
			q := &Problem{Key: key, Why: err.Error()}
			q.Source = source(key)
			errs = append(errs, q)
		}
	}
	walk(err, "")
	return errors.Join(errs...)
}

// Misspelt finds variables of environ (NAME=value) that begin as settings do and nearly are one of s. It gives the name
// of that for each. Those of the other roles are others' and are not meant.
func Misspelt(environ []string, s Settings, others ...Settings) map[string]string {
	var names []string // without the prefix
	read := slices.Clone(readElsewhere)
	for _, f := range fields(s) {
		names = append(names, strings.TrimPrefix(f.env(), EnvPrefix+"_"))
		read = append(read, f.env())
	}
	for _, o := range others {
		for _, f := range fields(o) {
			read = append(read, f.env())
		}
	}
	wrong := make(map[string]string)
	for _, v := range environ {
		name, _, _ := strings.Cut(v, "=")
		rest, ours := strings.CutPrefix(strings.ToUpper(name), EnvPrefix+"_")
		if !ours || slices.Contains(read, name) {
			continue
		}
		if near := spelling.Near(rest, names); len(near) > 0 {
			wrong[name] = EnvPrefix + "_" + near[0]
		}
	}
	return wrong
}

// readElsewhere are variables that other programs of the store read, and this one hands to its own.
var readElsewhere = []string{"KVD_CONTEXT", "KVD_CONTEXTS", "KVD_DEBUG", "KVD_HEX", "KVD_KEEPER_SOCKET",
	"KVD_KEEPER_STORE", "KVD_NAMESPACE", "KVD_OUTPUT"}

// LogLevel is the setting log.level of s, a role's.
func LogLevel(s Settings) slog.Level {
	for _, f := range fields(s) {
		if f.key == "log.level" {
			return Log{Level: f.value.String()}.SlogLevel()
		}
	}
	return slog.LevelInfo
}

// Differ lists the keys in which two settings of one role differ.
func Differ(a, b Settings) (keys []string) {
	other := fields(b)
	for i, f := range fields(a) {
		if format(f.value) != format(other[i].value) {
			keys = append(keys, f.key)
		}
	}
	return keys
}

// YAML writes s as a file that [Load] reads back to the same settings. Without secrets, [Redacted]
// stands for those that are set, and Load refuses it.
func YAML(s Settings, secrets bool) ([]byte, error) {
	root := &yaml.Node{Kind: yaml.MappingNode}
	sections := make(map[string]*yaml.Node)
	for _, f := range fields(s) {
		into, key := root, f.key
		if section, name, ok := strings.Cut(f.key, "."); ok {
			into, key = sections[section], name
			if into == nil {
				into = &yaml.Node{Kind: yaml.MappingNode}
				sections[section] = into
				root.Content = append(root.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: section}, into)
			}
		}
		value := new(yaml.Node)
		var plain any = f.value.Interface()
		switch v := plain.(type) {
		case Size:
			plain = v.String()
		case time.Duration:
			plain = v.String()
		case string:
			if f.secret && v != "" && !secrets {
				plain = Redacted
			}
		}
		if err := value.Encode(plain); err != nil {
			return nil, fmt.Errorf("%s: %w", f.key, err)
		}
		into.Content = append(into.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: key, HeadComment: "# " + f.usage},
			value)
	}
	return yaml.Marshal(root)
}
