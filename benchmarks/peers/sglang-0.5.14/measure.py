#!/usr/bin/env python3
# ruff: noqa
# fmt: off
# Kept as it ran, with these three lines added: it wrote the lines beside it, and its style is not this project's.
"""Measure SGLang 0.5.14 (peer engine) on one H200.  stdlib + psutil only; servers run with PYTHONPATH=./site.

bench_peer.py --groups 8b,smol --out $OUT/peer.jsonl [--attn fa3,triton] [--budget 540] [--only NAME,NAME]
One JSON line a measurement, appended as it goes.  All servers of a group start together (start-up overlaps), every
server but the one measured is SIGSTOPped (its process tree), each is measured in turn, then the group is ended.
"""
import argparse, http.client, json, os, random, signal, socket, subprocess, sys, threading, time, statistics as st

ap = argparse.ArgumentParser()
ap.add_argument('--groups', default='8b,smol')
ap.add_argument('--only', default='')
ap.add_argument('--models', default='./models')
ap.add_argument('--site', default='./site')
ap.add_argument('--tvm', default='./tvmcache')
ap.add_argument('--out', default='./peer.jsonl')
ap.add_argument('--logdir', default='./peerlogs')
ap.add_argument('--attn', default='fa3,triton', help='tried in this order for each server')
ap.add_argument('--budget', type=float, default=540, help='seconds for the whole script')
ap.add_argument('--start-timeout', type=float, default=240)
ap.add_argument('--bs', default='', help='override batch sizes, e.g. 1,8')
ap.add_argument('--in-len', type=int, default=128)
ap.add_argument('--out-len', type=int, default=512)
ap.add_argument('--reps', type=int, default=2)
ap.add_argument('--acc', default='2.5', help='SGLANG_SIMULATE_ACC_LEN for the dummy EAGLE-3 servers (mean accepted per step, bonus token included)')
ap.add_argument('--prompts', default='', help='json: list of token-id lists (SmolLM2); default: <models>/prompts.json if there')
ap.add_argument('--max-par', type=int, default=5, help='servers started at once')
ap.add_argument('--no-freeze', action='store_true')
ap.add_argument('--keep-logs', action='store_true')
ap.add_argument('--extra', default='', help='extra server flags for every server')
ap.add_argument('--python', default=sys.executable)
ap.add_argument('--stub', default='', help='test only: command to run instead of sglang')
A = ap.parse_args()
T0 = time.time()
M = A.models
left = lambda: A.budget - (time.time() - T0)

BIG = ['--model-path', f'{M}/llama31-8b-dummy', '--load-format', 'dummy', '--max-total-tokens', '65536', '--max-running-requests', '64', '--cuda-graph-bs-decode', '1', '8', '32', '--cuda-graph-max-bs-decode', '32']
SM = ['--model-path', f'{M}/smollm2-135m', '--max-total-tokens', '131072', '--max-running-requests', '64', '--cuda-graph-bs-decode', '1', '8', '32', '64', '--cuda-graph-max-bs-decode', '64']
def spec(algo, draft=None, s=3, k=1, d=4):
    r = ['--speculative-algorithm', algo]
    if draft: r += ['--speculative-draft-model-path', draft, '--speculative-num-steps', str(s), '--speculative-eagle-topk', str(k)]
    return r + ['--speculative-num-draft-tokens', str(d)]
SYNC = ['--disable-overlap-schedule']
E8, ES, DS = f'{M}/eagle3-8b-dummy', f'{M}/eagle3-smollm2', f'{M}/draft-smollm2'
SIM = {'SGLANG_SIMULATE_ACC_LEN': A.acc, 'SGLANG_SIMULATE_ACC_METHOD': 'match-expected'}
# name: (group, flags, env, batch sizes, path that must exist)
C = {
 '8b-nospec':            ('8b', BIG, {}, [1, 8, 32], None),
 '8b-eagle3-3-1-4':      ('8b', BIG + spec('EAGLE3', E8), SIM, [1, 8, 32], None),
 '8b-eagle3-3-1-4-sync': ('8b', BIG + spec('EAGLE3', E8) + SYNC, SIM, [1, 8, 32], None),
 '8b-eagle3-5-8-32':     ('8b', BIG + spec('EAGLE3', E8, 5, 8, 32), SIM, [1, 8, 32], None),
 '8b-nospec-sync':       ('8bx', BIG + SYNC, {}, [1, 8, 32], None),
 'smol-nospec':             ('smol', SM, {}, [1, 8, 32, 64], None),
 'smol-eagle3-3-1-4':       ('smol', SM + spec('EAGLE3', ES), {}, [1, 8, 32, 64], ES),
 'smol-eagle3-3-1-4-sync':  ('smol', SM + spec('EAGLE3', ES) + SYNC, {}, [1, 8, 32, 64], ES),
 'smol-ngram-16':           ('smol', SM + spec('NGRAM', d=16), {}, [1, 8, 32, 64], None),
 'smol-eagle3-5-4-16':      ('smol', SM + spec('EAGLE3', ES, 5, 4, 16), {}, [1, 8, 32, 64], ES),
 'smol-standalone-4-1-5':   ('smol', SM + spec('STANDALONE', DS, 4, 1, 5), {}, [1, 8, 32, 64], DS),
 'smol-nospec-sync':        ('smolx', SM + SYNC, {}, [1, 8, 32, 64], None),
}
COMMON = ['--skip-tokenizer-init', '--skip-server-warmup', '--sampling-backend', 'pytorch', '--grammar-backend', 'none',
          '--cuda-graph-backend-prefill', 'disabled', '--mem-fraction-static', '0.9', '--context-length', '4096',
          '--random-seed', '1', '--log-level', 'info', '--dtype', 'bfloat16', '--disable-radix-cache',
          '--watchdog-timeout', '100000', '--host', '127.0.0.1'] + A.extra.split()

def emit(d):
    d['t'] = round(time.time() - T0, 1)
    s = json.dumps(d); print(s, flush=True)
    with open(A.out, 'a') as f: f.write(s + '\n')

def rpc(port, path, body=None, timeout=60):
    c = http.client.HTTPConnection('127.0.0.1', port, timeout=timeout)
    c.request('POST' if body is not None else 'GET', path, json.dumps(body) if body is not None else None, {'Content-Type': 'application/json'})
    r = c.getresponse(); data = r.read(); c.close()
    if r.status != 200: raise RuntimeError(f'{path} {r.status} {data[:300]!r}')
    return json.loads(data) if data[:1] in b'[{' else data

class Server:
    def __init__(s, name, i, attn):
        s.name, s.attn, s.port, s.i = name, attn, 31000 + 2000 * i, i
        g, fl, env, s.bs, _ = C[name]
        e = dict(os.environ)
        if os.path.isdir('/usr/local/cuda'): e.setdefault('CUDA_HOME', '/usr/local/cuda')
        e['PATH'] = os.path.dirname(A.python) + ':/usr/local/cuda/bin:' + e.get('PATH', '')
        e.update(PYTHONPATH=A.site, TVM_FFI_CACHE_DIR=A.tvm, HF_HUB_OFFLINE='1', TRANSFORMERS_OFFLINE='1', TOKENIZERS_PARALLELISM='false',
                 HOST_IP='127.0.0.1', SGLANG_HOST_IP='127.0.0.1', GLOO_SOCKET_IFNAME='lo', NCCL_SOCKET_IFNAME='lo', TP_SOCKET_IFNAME='lo',
                 FLASHINFER_DISABLE_VERSION_CHECK='1', SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN='1', TORCHINDUCTOR_COMPILE_THREADS='4',
                 OMP_NUM_THREADS='4', PYTHONUNBUFFERED='1', **env)
        s.log = f'{A.logdir}/{name}.{attn}.log'; os.makedirs(A.logdir, exist_ok=True)
        cmd = (A.stub.split() + [str(s.port)]) if A.stub else [A.python, '-m', 'sglang.launch_server', *fl, *COMMON, '--attention-backend', attn, '--port', str(s.port)]
        s.cmd = ' '.join(cmd); s.t = time.time(); s.ready = None; s.err = None
        s.p = subprocess.Popen(cmd, env=e, stdout=open(s.log, 'w'), stderr=subprocess.STDOUT, start_new_session=True, cwd='/tmp')
    def poll(s):
        if s.ready or s.err: return
        if s.p.poll() is not None: s.err = f'exited {s.p.returncode}'; return
        if time.time() - s.t > A.start_timeout: s.err = 'start timeout'; s.kill(); return
        try: rpc(s.port, '/model_info', timeout=3); s.ready = time.time() - s.t
        except Exception: pass
    def tree(s):
        import psutil
        try: p = psutil.Process(s.p.pid); return [p] + p.children(recursive=True)
        except Exception: return []
    def sig(s, x):
        for p in s.tree():
            try: p.send_signal(x)
            except Exception: pass
    def kill(s):
        t = s.tree(); 
        for p in t:
            try: p.send_signal(signal.SIGCONT); p.kill()
            except Exception: pass
        try: s.p.wait(20)
        except Exception: pass
    def tail(s, n=25):
        try: return open(s.log, errors='replace').read().splitlines()[-n:]
        except Exception: return []

rng = random.Random(7)
PR = None
def prompts(n, name):
    global PR
    if name.startswith('smol'):
        if PR is None:
            PR = []
            f = A.prompts or f'{M}/prompts.json'
            if os.path.exists(f): PR = json.load(open(f))
            elif os.path.exists(f'{M}/smollm2-135m/tokenizer.json'):
                try:
                    from tokenizers import Tokenizer
                    tk = Tokenizer.from_file(f'{M}/smollm2-135m/tokenizer.json')
                    Q = ['Explain how plants make food from sunlight.', 'Write a short story about a lost dog who finds its way home.', 'What caused the First World War?', 'Write a Python function that sorts a list of numbers and explain each line.',
                         'Describe the water cycle for a child.', 'Who was Marie Curie and what did she discover?', 'Give me a recipe for vegetable soup with clear steps.', 'How do vaccines work?', 'List the planets of the solar system with one fact for each.',
                         'What are the main rules of chess?', 'Summarise the history of the printing press.', 'Why is the sky blue?', 'How are suspension bridges built?', 'Write a polite email asking for a day off.', 'What is the difference between weather and climate?', 'Explain how computers store numbers in binary.']
                    H = ['Keep it simple.', 'Answer in detail, in several paragraphs.', 'Use examples from everyday life.', 'Imagine that you are a patient teacher.']
                    for i in range(64):
                        PR.append(tk.encode('<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n<|im_start|>user\n' + Q[i % 16] + ' ' + H[i // 16] + '<|im_end|>\n<|im_start|>assistant\n', add_special_tokens=False).ids)
                except Exception as ex: print('tokenizer:', ex, flush=True)
        if PR:
            q = [list(p)[-A.in_len:] for p in PR]     # natural length, at most in_len
            return [q[i % len(q)] for i in range(n)]
        return [[rng.randrange(1000, 30000) for _ in range(A.in_len)] for _ in range(n)]
    return [[rng.randrange(1000, 30000) for _ in range(A.in_len)] for _ in range(n)]

def gen(port, ids, n, timeout):
    try: rpc(port, '/flush_cache?timeout=3', {}, 10)     # empties NGRAM's corpus too, so a repeat does not look its own output up
    except Exception: pass
    t = time.perf_counter()
    r = rpc(port, '/generate', {'input_ids': ids, 'sampling_params': {'temperature': 0.0, 'max_new_tokens': n, 'ignore_eos': True}, 'stream': False}, timeout)
    return time.perf_counter() - t, r if isinstance(r, list) else [r]

def stream(port, ids, n, timeout, res):
    try:
        c = http.client.HTTPConnection('127.0.0.1', port, timeout=timeout)
        t0 = time.perf_counter()
        c.request('POST', '/generate', json.dumps({'input_ids': ids, 'sampling_params': {'temperature': 0.0, 'max_new_tokens': n, 'ignore_eos': True}, 'stream': True}), {'Content-Type': 'application/json'})
        r = c.getresponse(); ev = []; meta = {}
        for line in r:
            if line.startswith(b'data:'):
                if b'[DONE]' in line: break
                t = time.perf_counter() - t0
                j = json.loads(line[5:]); meta = j.get('meta_info', {}); ev.append((t, meta.get('completion_tokens', len(ev) + 1)))
        c.close(); res.append((ev, meta))
    except Exception as ex: res.append(([], {'error': repr(ex)[:200]}))

def pct(x, q): x = sorted(x); return x[min(len(x) - 1, int(q * len(x)))]

def measure(s):
    bss = [int(x) for x in A.bs.split(',')] if A.bs else s.bs
    for b in bss:
        if left() < 8: emit({'config': s.name, 'bs': b, 'skipped': 'budget'}); return
        P = prompts(b, s.name); to = max(5, min(90, left()))
        d = {'config': s.name, 'attn': s.attn, 'bs': b, 'in': round(sum(map(len, P)) / b, 1), 'out': A.out_len, 'start_s': round(s.ready, 1)}
        try:
            w, _ = gen(s.port, P, 24, to); d['warm_s'] = round(w, 2)
            gen(s.port, prompts(b, s.name), 24, to)
            t1 = min(gen(s.port, prompts(b, s.name), 1, to)[0] for _ in range(3))
            runs = []
            for _ in range(A.reps):
                w, r = gen(s.port, prompts(b, s.name), A.out_len, to)
                m = [x['meta_info'] for x in r]; nt = sum(x['completion_tokens'] for x in m)
                runs.append((nt / w, (nt - b) / (w - t1), w, m))
                if left() < 6: break
            runs.sort(key=lambda x: x[1]); best = runs[-1]; m = best[3]
            d.update(prefill_s=round(t1, 4), tok_s=round(best[0], 1), decode_tok_s=round(best[1], 1), wall_s=round(best[2], 3), decode_tok_s_runs=[round(x[1], 1) for x in runs], ms_per_tok_seq=round(1000 * b / best[1], 4))
            al = [x['spec_accept_length'] for x in m if x.get('spec_accept_length')]
            if al:
                d['accept_len'] = round(sum(al) / len(al), 3); vc = [x['spec_verify_ct'] for x in m if x.get('spec_verify_ct')]
                d['verify_ct_mean'] = round(sum(vc) / len(vc), 1)
                d['ms_per_verify_step'] = round(1000 * (best[2] - t1) / max(vc), 3)
                if m[0].get('spec_accept_rate') is not None: d['accept_rate'] = round(sum(x.get('spec_accept_rate', 0) for x in m) / len(m), 3)
            emit(dict(d, kind='batch'))
        except Exception as ex:
            emit(dict(d, error=repr(ex)[:300], tail=s.tail(12)))
            if s.p.poll() is not None: return
            continue
        if b <= 32 and left() > 12:                       # streaming clients: TTFT and gaps
            try:
                P = prompts(b, s.name); res = []; n = min(A.out_len, 256)
                th = [threading.Thread(target=stream, args=(s.port, p, n, to, res)) for p in P]
                t = time.perf_counter(); [x.start() for x in th]; [x.join() for x in th]; w = time.perf_counter() - t
                ok = [e for e, _ in res if e]
                gaps = [y[0] - x[0] for e in ok for x, y in zip(e, e[1:])]
                tpot = [(e[-1][0] - e[0][0]) / max(1, e[-1][1] - e[0][1]) for e in ok if len(e) > 1]
                emit({'config': s.name, 'attn': s.attn, 'bs': b, 'kind': 'stream', 'out': n, 'n_ok': len(ok), 'ttft_ms_p50': round(1e3 * pct([e[0][0] for e in ok], .5), 2), 'ttft_ms_max': round(1e3 * max(e[0][0] for e in ok), 2),
                      'gap_ms_p50': round(1e3 * pct(gaps, .5), 3), 'gap_ms_p99': round(1e3 * pct(gaps, .99), 3), 'tpot_ms_mean': round(1e3 * st.mean(tpot), 4), 'tok_s': round(sum(e[-1][1] for e in ok) / w, 1)})
            except Exception as ex: emit({'config': s.name, 'bs': b, 'kind': 'stream', 'error': repr(ex)[:200]})
    try:
        si = rpc(s.port, '/server_info', timeout=10); x = si.get('internal_states', [{}])[0]
        emit({'config': s.name, 'kind': 'info', 'version': si.get('version'), 'avg_spec_accept_length': x.get('avg_spec_accept_length'), 'last_gen_throughput': x.get('last_gen_throughput'), 'memory': x.get('memory_usage')})
    except Exception as ex: emit({'config': s.name, 'kind': 'info', 'error': repr(ex)[:100]})

def run(names, attns):
    live = [Server(n, i, attns[0]) for i, n in enumerate(names)]
    try:
        while any(not (s.ready or s.err) for s in live) and left() > 15:
            for s in live: s.poll()
            time.sleep(.3)
        for s in live:
            if s.ready: print(f'# {s.name} ready in {s.ready:.1f}s ({s.attn})', flush=True)
            else: emit({'config': s.name, 'attn': s.attn, 'error': s.err or 'not ready in budget', 'tail': s.tail(30)})
        up = [s for s in live if s.ready]
        if not A.no_freeze and len(up) > 1:
            for s in up: s.sig(signal.SIGSTOP)
        for s in up:
            if left() < 8: emit({'config': s.name, 'skipped': 'budget'}); continue
            if not A.no_freeze: s.sig(signal.SIGCONT); time.sleep(.3)
            measure(s); s.kill()
        return [s.name for s in live if s.err]
    finally:
        for s in live: s.kill()
        with open(os.path.dirname(os.path.abspath(A.out)) + '/peer_logs.txt', 'a') as f:
            for s in live: f.write(f'\n===== {s.name} {s.attn} :: {s.cmd}\n' + '\n'.join(s.tail(400 if A.keep_logs else 60)) + '\n')

attns = A.attn.split(',')
only = [x for x in A.only.split(',') if x]
for g in ([''] if only else A.groups.split(',')):
    names = only or [n for n, v in C.items() if v[0] == g]
    for n in list(names):
        if C[n][4] and not os.path.exists(C[n][4]): names.remove(n); print('# no', C[n][4], '-> skip', n, flush=True)
    for i in range(0, len(names), A.max_par):
        todo = names[i:i + A.max_par]
        for k in range(len(attns)):
            if todo and left() > 40: todo = run(todo, attns[k:])
print('# done', round(time.time() - T0, 1), flush=True)
