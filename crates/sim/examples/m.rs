use tidegate_sim::load_cases;
fn main(){
  let a:Vec<String>=std::env::args().skip(1).collect();
  let want=|s:&str|a.iter().all(|x|s.contains(x.as_str()));
  let cases:Vec<_>=load_cases().into_iter().map(|c|(format!("lim={}/{}b{}; n={}; {}; x={}; c={};",c.amount,c.period_s,c.burst,c.nodes,c.spread_name,c.load_tenths,c.cost_max),c)).filter(|(s,_)|want(s)).collect();
  let next=std::sync::atomic::AtomicUsize::new(0);
  let out=std::sync::Mutex::new(vec![]);
  std::thread::scope(|sc|{for _ in 0..2{sc.spawn(||loop{let i=next.fetch_add(1,std::sync::atomic::Ordering::SeqCst);if i>=cases.len(){break}
    let t=std::time::Instant::now();let r=cases[i].1.measure();out.lock().unwrap().push((i,r,t.elapsed().as_secs_f64()));});}});
  let mut o=out.into_inner().unwrap();o.sort_by_key(|x|x.0);
  let mut bad=0;let mut fa=0.0;let mut fc=0u32;
  for (i,r,t) in o{let c=&cases[i];let b=(c.1.cost_max==1&&r.share<0.97)||r.net_denials>0.003||r.violations>0;fa+=r.false_denials;fc+=c.1.is_within_limit() as u32;bad+=b as u32;
  println!("{:45} share {:.4} net {:.4} false {:.4} waited {:.4} calls {:.4} viol {} {:.1}s{}",c.0,r.share,r.net_denials,r.false_denials,r.waited,r.calls,r.violations,t,if b{" BAD"}else{""});}
  println!("bad {bad} of {} false mean {:.5}",cases.len(),fa/fc.max(1) as f64);
}
