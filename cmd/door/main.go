// Door is the fleet's read-only door to a private bucket, for boxes that have no
// credentials of it, or that belong to somebody else.
//
// It is started by whatever runs services where the bucket can be reached, and
// keeps no state of its own. It ends at SIGTERM, when the bodies that are on their
// way have been sent.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/peterbourgon/ff/v3/ffcli"

	"sluice/internal/door"
	"sluice/internal/outcome"
	"sluice/internal/program"
	"sluice/internal/store"
)

func main() { program.Main(command()) }

// How long bodies that are on their way may take when the door is told to end.
const defaultGrace = 30 * time.Second

type options struct {
	store, listen, cert, key, clientCA, domain, health string
	poll, grace                                        time.Duration
}

func command() *ffcli.Command {
	set, o := flag.NewFlagSet("door", flag.ContinueOnError), &options{}
	set.StringVar(&o.store, "store", "", "`URL` of the store that is served")
	set.StringVar(&o.listen, "listen", ":8443", "`address` to listen on, with TLS 1.3")
	set.StringVar(&o.cert, "cert", "", "`file` of the door's certificate and its chain, PEM; read anew when it changes")
	set.StringVar(&o.key, "tls-key", "", "`file` of the certificate's key, PEM")
	set.StringVar(&o.clientCA, "client-ca", "", "`file` of who signs client certificates, PEM; without it only tokens count")
	set.StringVar(&o.domain, "domain", "", "SPIFFE trust `domain` of client certificates: spiffe://DOMAIN/box/LABEL")
	set.StringVar(&o.health, "health", "127.0.0.1:9465", "`address` of /healthz and /metrics, without TLS; empty for none")
	set.DurationVar(&o.poll, "poll", 250*time.Millisecond, "how often the store's bell is looked at while somebody waits for it")
	set.DurationVar(&o.grace, "grace", defaultGrace, "how long bodies on their way may take when the door is told to end")
	return &ffcli.Command{Name: "door", ShortHelp: "a door to a private bucket, for boxes", ShortUsage: "door -store URL -cert FILE -tls-key FILE [flags]", FlagSet: set,
		LongHelp: "Hands out what a box needs, and nothing else, to boxes that prove who they are by a client\ncertificate or by a token (sluice door token LABEL). Takes each box's own heartbeat.",
		Exec: func(ctx context.Context, args []string) error {
			if err := program.NoOperands(args); err != nil {
				return err
			}
			return run(ctx, o)
		}}
}

func run(ctx context.Context, o *options) error {
	if o.store == "" {
		return outcome.Config("say which store is served: -store URL or SLUICE_STORE")
	}
	if o.poll <= 0 || o.grace < 0 {
		return outcome.Usage("-poll must be positive, and -grace not negative")
	}
	if (o.clientCA == "") != (o.domain == "") {
		return outcome.Config("-client-ca and -domain go together: a certificate counts for the domain of its SPIFFE id")
	}
	s, err := store.Open(o.store)
	if err != nil {
		return err
	}
	config, err := tlsConfig(o)
	if err != nil {
		return err
	}
	d := &door.Door{Store: s, Domain: o.domain, Log: program.Log, Poll: o.poll}
	d.Run(ctx)
	listener, err := net.Listen("tcp", o.listen)
	if err != nil {
		return outcome.Config("%w", err)
	}
	server := d.Server()
	failed := make(chan error, 2)
	go func() { failed <- server.Serve(tls.NewListener(listener, config)) }()
	if o.health != "" {
		aside, err := net.Listen("tcp", o.health)
		if err != nil {
			return outcome.Config("-health: %w", err)
		}
		health := &http.Server{Handler: d.Health(), ReadHeaderTimeout: 10 * time.Second}
		defer health.Close()
		go func() { failed <- health.Serve(aside) }()
	}
	program.Log.Info("open", "store", s.String(), "address", listener.Addr().String())
	program.Ready()
	select {
	case err := <-failed:
		return fmt.Errorf("serving: %w", err)
	case <-ctx.Done():
	}
	program.Status("ending: bodies on their way are sent")
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), o.grace)
	defer cancel()
	if err := server.Shutdown(end); err != nil {
		return errors.Join(fmt.Errorf("after %s some bodies were still on their way: they are cut off, and boxes resume them", o.grace), server.Close())
	}
	return nil
}

// tlsConfig is TLS 1.3, with a certificate that is read anew when its file
// changes, as renewals do.
func tlsConfig(o *options) (*tls.Config, error) {
	if o.cert == "" || o.key == "" {
		return nil, outcome.Config("say which certificate is the door's: -cert FILE -tls-key FILE")
	}
	pair := &reloaded{cert: o.cert, key: o.key}
	if _, err := pair.get(nil); err != nil {
		return nil, err
	}
	config := &tls.Config{MinVersion: tls.VersionTLS13, GetCertificate: pair.get, NextProtos: []string{"http/1.1"}}
	if o.clientCA != "" {
		data, err := os.ReadFile(o.clientCA)
		if err != nil {
			return nil, outcome.Config("-client-ca: %w", err)
		}
		config.ClientCAs, config.ClientAuth = x509.NewCertPool(), tls.VerifyClientCertIfGiven
		if !config.ClientCAs.AppendCertsFromPEM(data) {
			return nil, outcome.Config("-client-ca: %q holds no certificate", o.clientCA)
		}
	}
	return config, nil
}

type reloaded struct {
	cert, key string

	mu   sync.Mutex
	at   time.Time // of the certificate's file
	pair *tls.Certificate
}

func (r *reloaded) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	st, err := os.Stat(r.cert)
	if err == nil && r.pair != nil && st.ModTime().Equal(r.at) {
		return r.pair, nil
	}
	pair, lerr := tls.LoadX509KeyPair(r.cert, r.key)
	if err := errors.Join(err, lerr); err != nil {
		if r.pair != nil { // half renewed: the one before counts for longer than this takes
			program.Log.Warn("reading the certificate anew: " + err.Error() + ", ignoring")
			return r.pair, nil
		}
		return nil, outcome.Config("the door's certificate: %w", err)
	}
	r.pair, r.at = &pair, st.ModTime()
	return r.pair, nil
}
