// What a user of @unkey/api does, endpoint by endpoint; the client checks every answer against its own schemas.
// node unkey_api.cjs NODE_DIR URL TOKEN
require("./patient.cjs");
const assert = require("node:assert/strict");
const { createRequire } = require("node:module");
const [nodeDir, serverURL, rootKey] = process.argv.slice(2);
const { Unkey } = createRequire(`${nodeDir}/`)("@unkey/api");
const { ratelimit } = new Unkey({ serverURL, rootKey });
const namespace = "api";
const hour = 3_600_000;

async function limits() {
  const one = await ratelimit.limit({ namespace, identifier: "alice", limit: 10, duration: hour, cost: 4 });
  assert.match(one.meta.requestId, /^req_/);
  assert.deepEqual([one.data.success, one.data.remaining], [true, 6]);
  const of = (identifier, limit) => ({ namespace, identifier, limit, duration: hour });
  const both = await ratelimit.multiLimit([of("alice", 10), of("bob", 1)]);
  assert.equal(both.data.passed, true);
  assert.deepEqual(both.data.limits.map((limit) => limit.remaining), [5, 0]);
  const denied = await ratelimit.multiLimit([of("alice", 10), of("bob", 1)]);
  assert.equal(denied.data.passed, false);
  assert.deepEqual(denied.data.limits.map((limit) => limit.passed), [true, false]);
  const after = await ratelimit.limit({ ...of("alice", 10), cost: 0 });
  assert.equal(after.data.remaining, 5, "what was denied charged nothing");
}

async function pages() {
  for (let at = 0; at < 25; at++) {
    await ratelimit.setOverride({ namespace, identifier: `user_${at}`, limit: at, duration: hour });
  }
  const seen = [];
  for await (const page of await ratelimit.listOverrides({ namespace, limit: 10 })) {
    seen.push(...page.result.data.map((one) => one.identifier));
  }
  const expected = [...Array(25).keys()].map((at) => `user_${at}`).sort();
  assert.deepEqual(seen, expected);
  assert.deepEqual((await ratelimit.deleteOverride({ namespace, identifier: "user_3" })).data, {});
  const missing = ratelimit.deleteOverride({ namespace, identifier: "user_3" });
  await assert.rejects(missing, (error) => error.name === "NotFoundErrorResponse" && error.error.status === 404);
}

async function wrong() {
  const empty = ratelimit.limit({ namespace: "", identifier: "a", limit: 1, duration: 1 });
  await assert.rejects(empty, (error) => {
    assert.equal(error.name, "BadRequestErrorResponse");
    assert.deepEqual(error.error.errors.map((one) => one.location), ["body.namespace", "body.duration"]);
    return true;
  });
  const stranger = new Unkey({ serverURL, rootKey: "tg_unknown" });
  const refused = stranger.ratelimit.getOverride({ namespace, identifier: "a" });
  await assert.rejects(refused, (error) => error.name === "UnauthorizedErrorResponse");
}

limits()
  .then(pages)
  .then(wrong)
  .then(() => console.log("ok"));
