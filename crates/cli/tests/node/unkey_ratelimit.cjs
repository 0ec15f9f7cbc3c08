// What a user of @unkey/ratelimit does: limits, overrides, and what comes back when something is wrong.
// node unkey_ratelimit.cjs NODE_DIR URL TOKEN
require("./patient.cjs");
const assert = require("node:assert/strict");
const { createRequire } = require("node:module");
const [nodeDir, baseUrl, rootKey] = process.argv.slice(2);
const { Ratelimit, Overrides } = createRequire(`${nodeDir}/`)("@unkey/ratelimit");

async function limits() {
  const limiter = new Ratelimit({ baseUrl, rootKey, namespace: "js.limits", limit: 3, duration: "1h" });
  const before = Date.now();
  for (const remaining of [2, 1, 0]) {
    const passed = await limiter.limit("alice");
    assert.deepEqual([passed.success, passed.limit, passed.remaining], [true, 3, remaining]);
    assert.ok(passed.reset > before && passed.reset <= Date.now() + 2 * 3_600_000, `reset ${passed.reset}`);
  }
  const denied = await limiter.limit("alice");
  assert.deepEqual([denied.success, denied.limit, denied.remaining], [false, 3, 0]);
  assert.ok(denied.reset > before, "a denial says when to come back");
  assert.equal((await limiter.limit("bob", { cost: 3 })).success, true);
  assert.equal((await limiter.limit("bob", { cost: 0 })).remaining, 0);
  assert.equal((await limiter.limit("bob", { limit: { limit: 5, duration: "1h" } })).remaining, 1);
}

async function overrides() {
  const namespace = "js.overrides";
  const kept = new Overrides({ baseUrl, rootKey });
  const { data: vip } = await kept.setOverride({ namespace, identifier: "vip_*", limit: 100, duration: 60_000 });
  assert.match(vip.overrideId, /^ovr_/);
  await kept.setOverride({ namespace, identifier: "vip_banned", limit: 0, duration: 60_000 });
  const limiter = new Ratelimit({ baseUrl, rootKey, namespace, limit: 1, duration: 1_000 });
  const passed = await limiter.limit("vip_1");
  assert.deepEqual([passed.success, passed.limit, passed.overrideId], [true, 100, vip.overrideId]);
  assert.equal((await limiter.limit("vip_banned")).success, false);
  assert.equal((await limiter.limit("somebody")).overrideId, undefined);
  const { data: got } = await kept.getOverride({ namespace, identifier: "vip_*" });
  // The client may drop `scope`, which Unkey does not have.
  const { scope, ...known } = got;
  assert.ok(scope === undefined || scope === "server", scope);
  assert.deepEqual(known, { overrideId: vip.overrideId, identifier: "vip_*", limit: 100, duration: 60_000 });
  const listed = await kept.listOverrides({ namespace });
  const page = listed.result ?? listed;
  assert.deepEqual(page.data.map((one) => one.identifier), ["vip_*", "vip_banned"]);
  await kept.deleteOverride({ namespace, identifier: "vip_*" });
  assert.equal((await limiter.limit("vip_1")).limit, 1);
  await assert.rejects(kept.getOverride({ namespace, identifier: "vip_*" }), (error) => error.statusCode === 404);
}

async function wrong() {
  const stranger = new Ratelimit({ baseUrl, rootKey: "tg_unknown", namespace: "n", limit: 1, duration: 1_000 });
  await assert.rejects(stranger.limit("a"), (error) => error.statusCode === 401);
  const short = new Ratelimit({ baseUrl, rootKey, namespace: "n", limit: 1, duration: 999 });
  await assert.rejects(short.limit("a"), (error) => {
    assert.equal(error.error.errors[0].location, "body.duration");
    return error.statusCode === 400;
  });
}

limits()
  .then(overrides)
  .then(wrong)
  .then(() => console.log("ok"));
